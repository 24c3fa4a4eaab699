"""Lines of the package that only some machines reach, and crashes planted in them."""

import importlib.util
import os
import re
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import finetune

# Environment variable with the module and the text of the line at which a process crashes.
CRASH = "REHEARSED_CRASH"


@dataclass(frozen=True)
class Branch:
    """A line that depends on the machine, and the rehearsal that reaches it.

    Args:
        module: The module, without the name of the package.
        text: A part of the line that is unique in the module.
        machine: A machine of ``stand_ins.py``.
        step: A step of ``script.py``.
    """

    module: str
    text: str
    machine: str
    step: str

    @property
    def crash(self) -> str:
        """The value of the variable that plants a crash here."""
        return f"finetune.{self.module}\n{self.text}"


@cache
def find_line(crash: str) -> tuple[str, int]:
    """Return the file and the number of a line."""
    module, _, text = crash.partition("\n")
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    lines = Path(spec.origin).read_text(encoding="utf-8").splitlines()
    numbers = [number for number, line in enumerate(lines, start=1) if text in line]
    assert len(numbers) == 1, f"{module} has {len(numbers)} lines with {text}"
    return spec.origin, numbers[0]


def plant_crash() -> None:
    """Raise an error when this process reaches the line of the environment variable."""
    if not (crash := os.environ.get(CRASH)):
        return
    file, number = find_line(crash)

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno == number:
            raise ZeroDivisionError("a planted crash")
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename == file else None

    threading.settrace(trace_call)
    sys.settrace(trace_call)


_RUN, _AUTO, _FIND = "run with numbers", "run --batch-size auto", "find-batch"
_CPU, _MAC, _BIG_MAC, _NVIDIA = "cpu-without-bf16", "mac-8gb", "mac-64gb", "nvidia"
_TWO_CPUS, _TWO_GPUS = "two-cpu-ranks", "two-nvidia-ranks"

BRANCHES = tuple(Branch(*values) for values in (
    ("batch_finder.search", "share = available_bytes() // ranks", _TWO_CPUS, _AUTO),
    ("batch_finder.trial_model", "steps = 1 if device.is_reference", _CPU, _FIND),
    ("batch_finder.trials", "reserved_bytes = process_bytes(", _MAC, _FIND),
    ("batch_finder.trials", "requests.put(_fork_child(", _CPU, _FIND),
    ("devices.base", "return max(count, batch_size, self.min_examples)", _MAC, _RUN),
    ("devices.cpu", 'return _read_status().get("VmHWM")', _CPU, _RUN),
    ("devices.cpu", '_CLEAR.write_text("5")', _CPU, _FIND),
    ("devices.cpu", "resource.setrlimit(", _CPU, _FIND),
    ("devices.cuda", "has_bf16 = torch.cuda.is_bf16_supported(", _NVIDIA, "doctor"),
    ("devices.cuda", "return tensor.pin_memory()", _NVIDIA, _RUN),
    ("devices.cuda", "torch.backends.cuda.enable_cudnn_sdp(", _NVIDIA, _RUN),
    ("devices.cuda", "available_bytes = max(0, free_bytes", _NVIDIA, _FIND),
    ("devices.cuda", "gpus = [gpu] * distributed.get_world_size()", _TWO_GPUS, _RUN),
    ("devices.host", "except FileNotFoundError:", "linux-without-proc", "doctor"),
    ("devices.host", 'flags = f"{cpu.get(', "arm-linux", _RUN),
    ("devices.host", 'return read_sysctl("kern.osproductversion")', _MAC, "doctor"),
    ("devices.host", 'return read_sysctl("machdep.cpu.brand_string")', _MAC, "doctor"),
    ("devices.host", 'return read_sysctl("hw.optional.arm.FEAT_BF16")', _BIG_MAC, _FIND),
    ("devices.host", "has_ended = library.proc_pid_rusage(", _MAC, _FIND),
    ("devices.host", "with subprocess.Popen(command, stdin", _MAC, _RUN),
    ("devices.mps.device", "if not torch.backends.mps.is_available()", _MAC, "doctor"),
    ("devices.mps.device", "self.shapes = replace(", _MAC, "doctor"),
    ("devices.mps.device", "return torch.accelerator.max_memory_allocated()", _MAC, _RUN),
    ("devices.mps.device", "torch.accelerator.reset_peak_memory_stats()", _MAC, _FIND),
    ("devices.mps.device", "return self.reserved_bytes() > min(", _MAC, _RUN),
    ("devices.mps.device", "allowed_bytes = int(recommended_bytes", _MAC, _FIND),
    ("devices.mps.device", "torch.mps.set_per_process_memory_fraction(", _MAC, _FIND),
    ("distributed", "_device_group = device.make_group()", _TWO_GPUS, _RUN),
    ("distributed", "work = torch.distributed.all_reduce(tensor,", _TWO_CPUS, _RUN),
    ("distributed", "all_reduce(numbers,", _TWO_CPUS, _RUN),
    ("distributed", "broadcast_object_list(values)", _TWO_CPUS, _RUN),
    ("distributed", "gather_object([value])", _TWO_CPUS, _RUN),
    ("doctor.checkup", 'name = f"macOS', _MAC, "doctor"),
    ("runs.linear_head", "limit = max(int(MAX_WORK / work)", _CPU, "data audit"),
    ("runs.manifest", "count = distributed.world_size()", _TWO_CPUS, _RUN),
    ("runs.plan", "shapes = replace(shapes, max_shapes=", _MAC, "run --freeze-core"),
    ("runs.plan", "examples = min(examples, _rows_per_step(", _TWO_CPUS, _RUN),
    ("runs.plan", "eval_batch_size = BatchSize(plan.eval_batch_size", _CPU, _RUN),
    ("runs.plan", "training = evaluation = min(training, evaluation)", _MAC, _AUTO),
    ("runs.prepare", 'several = f", {count} processes"', _TWO_CPUS, _RUN),
    ("runs.trained", "lengths = 2 ** np.ceil(", _MAC, "predict a text"),
    ("tokenization.examples", "return _fewest_tokens(", _MAC, "run"),
    ("training.checks", "attempts = 1 if trainer.plan.precision", _MAC, _RUN),
    ("training.micro_batches", "multiple = batch_size if device", _NVIDIA, _RUN),
    ("training.micro_batches", "slices = [fill_batch(rows", _MAC, "run --long-texts windows"),
    ("training.plan", "filled_to = self.examples_per_step", _NVIDIA, _RUN),
    ("training.precision", 'reason = "passed the parity test"', _BIG_MAC, _RUN),
    ("training.precision", 'parity = f"finetune doctor --parity', _MAC, _RUN),
    ("training.precision", "return _NO_INSTRUCTIONS if is_slow(", _CPU, _RUN),
    ("training.precision", "choice = _time_layer(", "cpu-with-bf16", "run"),
    ("training.loop", "batches = longest_first(batches)", _NVIDIA, _RUN),
    ("training.trainer", "flat_gradients = flatten(gradients_of(", _TWO_CPUS, _RUN),
    ("evaluation.predict", "count = distributed.world_size()", _TWO_CPUS, _RUN),
))  # fmt: skip

# Modules that rehearsals don't reach, and the tests that do.
UNCOVERED = {
    "devices.cpu": "the peak of a run on the CPU of a Mac: tests/devices/test_cpu.py",
    "devices.captured": "CUDA graphs need a GPU: tests/devices/test_cuda_graphs.py",
    "training.optimizers": "a tensor of learning rates is for CUDA graphs, on a GPU: the same file",
    "runs.checkpoint": "the best step of several ranks: tests/runs/test_processes.py",
    "runs.run": "a failing run saves unless others train with it: tests/commands/test_torchrun.py",
}
# Names that make code depend on the machine.
MARKS = re.compile(
    r"has_silent_faults|times_bf16|is_reference|pads_batches|counts_evaluation|max_shapes"
    r"|\.captures\b|world_size\(\)|is_mac\(\)|is_linux\(\)|can_fork\(\)|\"/proc|is_shared"
)


def modules_with_branches() -> set[str]:
    """Return the modules, without the name of the package, that depend on the machine."""
    [folder] = finetune.__path__
    files = Path(folder).rglob("*.py")
    return {
        ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in files
        if MARKS.search(file.read_text(encoding="utf-8"))
    }
