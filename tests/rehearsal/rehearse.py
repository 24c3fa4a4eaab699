"""Rehearses the commands with their default options, on this machine or on simulated machines.

``make rehearse DEVICE=mps`` runs the script on this machine, prints a line per command, and writes
a file to attach to a report. ``--machines`` simulates machines of ``stand_ins.py``. Each command
then is a fork of a process that has imported everything.
"""

import argparse
import gc
import importlib
import json
import os
import pkgutil
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rehearsal.script import MAX_SECONDS, STEPS, Stage, StepError, write_tables

# Modules that commands import lazily.
LAZY = (
    "onnxscript", "onnxruntime", "peft", "uvicorn", "evaluate", "sklearn.metrics",
    "transformers.models.bert.modeling_bert", "transformers.models.auto.modeling_auto",
    "torch.onnx", "torch.export", "peft.tuners.lora",
)  # fmt: skip


# The standard deviation of weights. A new BERT has logits near zero, for which rounding errors in
# 16 bits are larger than in a trained model.
WEIGHT_SIZE = 0.1
# The maximum length of a failure in characters, so that its JSON fits into 4 KiB.
_MAX_FAILURE = 2000


class Spawned:
    """A command in a new Python process."""

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], folder: Path, output: Path
    ) -> None:
        with output.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "finetune", *arguments],
                env=os.environ | variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.pid = self._process.pid

    def wait(self) -> int:
        return self._process.wait(MAX_SECONDS)


class Forked:
    """A command in a fork of this process."""

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], folder: Path, output: Path
    ) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update(variables)
            sys.argv = ["finetune", *arguments]
            with output.open("ab") as file:
                run_and_exit("finetune", output=file.fileno())

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class ForkedModule:
    """``python -P -m MODULE ARGUMENTS`` in a fork of this process, which has imported the module.

    It replaces ``subprocess.Popen`` for the trials of batch sizes, because importing PyTorch again
    takes longer than a trial.
    """

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], **_: object) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            _, _, _, module, *sys.argv[1:] = command
            run_and_exit(module, output=stdout.fileno())

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = MAX_SECONDS) -> int:
        ends_at = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired("a trial", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def run_and_exit(module: str, *, output: int) -> None:
    """Run a module as ``python -m`` does, in a fork, and end the process."""
    from rehearsal.crashes import plant_crash

    code = 70
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        plant_crash()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step. ``failure`` is empty if it passed, and ``seconds`` is CPU time."""

    machine: str
    step: str
    seconds: float
    failure: str = ""


def play(name: str, stage: Stage) -> str:
    """Run a step, and return why it failed, or an empty string if it passed."""
    try:
        STEPS[name](stage)
    except StepError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return ""


def play_all(machine: str, stage: Stage, steps: Sequence[str]) -> Iterator[Outcome]:
    """Run steps one after another."""
    for step in steps:
        before = sum(os.times()[:4])
        failure = play(step, stage)
        yield Outcome(machine, step, sum(os.times()[:4]) - before, failure)


def import_everything() -> None:
    """Import all modules that commands use, before the first fork."""
    import finetune

    for module in pkgutil.walk_packages(finetune.__path__, "finetune."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in LAZY:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy the memory of all objects


def be_machine(name: str, folder: Path, model: Path) -> Stage:
    """Simulate a machine in this process and its children, and return where its commands run."""
    from huggingface_hub import constants
    from rehearsal import stand_ins

    from finetune.batch_finder import trial_model, trials

    rehearsal = stand_ins.REHEARSALS[name]
    programs = folder / "programs"
    programs.mkdir(parents=True)
    write_tables(folder)
    stand_ins.write_caffeinate(programs)
    # Python imports a module with this name at startup.
    (programs / "sitecustomize.py").write_text(
        "from rehearsal import stand_ins\nstand_ins.prepare()\n"
    )
    sys.path.insert(0, str(programs))
    os.environ |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        stand_ins.MACHINE: name,
    }
    stand_ins.be_on(rehearsal)
    # These constants were set on import. Each machine has its own cache.
    constants.HF_HUB_CACHE = str(folder / "cache" / "hub")
    constants.HF_ASSETS_CACHE = str(folder / "cache" / "assets")
    # The speeds are ignored, and would take a second each.
    trial_model._MIN_TIMED_SECONDS = 0.05
    trials.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=ForkedModule, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    return Stage(
        folder, model, rehearsal.device, rehearsal.precisions, Forked,
        parity=rehearsal.parity, ranks=rehearsal.ranks,
    )  # fmt: skip


def rehearse_machine(
    name: str, folder: Path, model: Path, *, with_crashes: bool
) -> Iterator[Outcome]:
    """Rehearse on a simulated machine. With crashes, expect each planted crash to be detected."""
    from rehearsal.crashes import BRANCHES, CRASH
    from rehearsal.stand_ins import REHEARSALS

    stage = be_machine(name, folder / name, model)
    for step in STEPS:
        if step in REHEARSALS[name].left_out:
            continue
        for branch in BRANCHES if with_crashes else ():
            if (branch.machine, branch.step) == (name, step):
                copy = Path(shutil.copytree(stage.folder, folder / f"{name}-crash"))
                crashing = replace(stage, folder=copy, variables={CRASH: branch.crash})
                detected = play(step, crashing)
                shutil.rmtree(copy)
                crash = f"crash at {branch.module}: {branch.text}"
                yield Outcome(name, crash, 0, "" if detected else f"{step} doesn't detect it")
        yield from play_all(name, stage, [step])


def rehearse_machines(
    names: Sequence[str], folder: Path, *, with_crashes: bool = False
) -> Iterator[Outcome]:
    """Rehearse on simulated machines, as many at a time as there are cores."""
    from tiny_models import save_tiny_model

    import_everything()
    model = save_tiny_model(folder / "model", initializer_range=WEIGHT_SIZE)
    waiting, running = [*names], 0
    reader, writer = os.pipe()
    while waiting or running:
        while waiting and running < (os.cpu_count() or 1):
            name = waiting.pop(0)
            if not os.fork():
                rehearse_in_child(name, folder, model, writer, with_crashes=with_crashes)
            running += 1
        # Lines are written atomically.
        for line in os.read(reader, 2**20).decode(errors="replace").splitlines():
            row = json.loads(line)
            running -= row is None
            if row:
                yield Outcome(**row)


def rehearse_in_child(
    name: str, folder: Path, model: Path, writer: int, *, with_crashes: bool
) -> None:
    """Write a line for each outcome on a machine, then null, and end this process."""
    try:
        for outcome in rehearse_machine(name, folder, model, with_crashes=with_crashes):
            # Writes of up to 4 KiB to a pipe are atomic.
            short = replace(outcome, failure=outcome.failure[-_MAX_FAILURE:])
            os.write(writer, f"{json.dumps(asdict(short), ensure_ascii=True)}\n".encode())
    except Exception:
        row = Outcome(name, "the rehearsal itself", 0, traceback.format_exc()[-_MAX_FAILURE:])
        os.write(writer, f"{json.dumps(asdict(row))}\n".encode())
    finally:
        os.write(writer, b"null\n")
        os._exit(0)


def rehearse_here(device: str, folder: Path) -> Iterator[Outcome]:
    """Rehearse on this machine, with a new process for each command."""
    from tiny_models import save_tiny_model

    write_tables(folder)
    model = save_tiny_model(folder / "model", initializer_range=WEIGHT_SIZE)
    variables = {"FINETUNE_DEVICE": device, "COLUMNS": "100", "NO_COLOR": "1"}
    stage = Stage(folder, model, device, ("fp32", "bf16"), Spawned, variables=variables)
    yield from play_all(device, stage, [*STEPS])


def write_log(folder: Path, lines: Sequence[str], log: Path) -> None:
    """Write a file to attach to a report, with a line per command and the output of each."""
    outputs = [file.read_text(errors="replace") for file in sorted(folder.glob("output-*.txt"))]
    log.write_text("\n".join([*lines, "", *outputs]), encoding="utf-8")


def main() -> None:
    """Print a line per command, and the output of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--machines", nargs="+", default=[])
    parser.add_argument("--crashes", action="store_true", help="expect planted crashes to show")
    parser.add_argument("--log", type=Path, help="a file for the output of all commands")
    options = parser.parse_args()
    lines, failures = [], 0
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        for outcome in (
            rehearse_machines(options.machines, folder, with_crashes=options.crashes)
            if options.machines
            else rehearse_here(options.device, folder)
        ):
            verdict = "FAILED" if outcome.failure else "ok"
            lines.append(
                f"{outcome.machine:18} {outcome.step:60} {outcome.seconds:6.1f} s  {verdict}"
            )
            print(lines[-1], flush=True)
            if outcome.failure:
                failures += 1
                print(outcome.failure[-_MAX_FAILURE:], flush=True)
        if options.log:
            write_log(folder, lines, options.log)
            print(f"the output of all commands is in {options.log}", flush=True)
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    # With several threads, machines that are rehearsed concurrently would slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
