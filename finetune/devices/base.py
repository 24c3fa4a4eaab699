"""Interfaces of devices, their memory and batch shapes, and a batch size that can shrink."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import psutil
import torch
from torch import distributed, nn

from finetune import events
from finetune.devices.captured import CapturedFunction, Function
from finetune.errors import BatchDoesNotFitError
from finetune.events import emit

Result = TypeVar("Result")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Maximum number of evaluation batches that frozen layers process at once.
_MAX_BATCHES_AT_ONCE = 16


class OutOfMemoryElsewhereError(RuntimeError):
    """Another rank ran out of memory. All ranks repeat their work in smaller micro-batches."""


class Device:
    """A device on which a model trains."""

    name: str
    description: str
    torch_device: torch.device
    # Supported precisions, fp32 first.
    precisions: tuple[str, ...]
    fused_adamw_scales_gradients = True
    captures = False
    # Number of tokens in batches copied to the device together.
    prefetch_tokens = 0
    # Whether kernels are known to silently return wrong results. If so, runs compare the
    # device with the CPU, and 16 bits are the default only after ``doctor --parity`` passed.
    has_silent_faults = False
    # Whether bf16 can be slower than fp32 and is timed before it becomes the default.
    times_bf16 = False
    # Whether other devices are compared with this device.
    is_reference = False
    memory: "DeviceMemory"
    shapes: "BatchShapes"

    @staticmethod
    def why_not_usable() -> "Unusable | None":
        """Return why the device can't be used here, or None if a small operation works."""
        return None

    def synchronize(self) -> None:
        """Wait until the device finishes all queued work."""
        torch.get_device_module(self.torch_device).synchronize()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the device, if possible without waiting for queued work."""
        return tensor.to(self.torch_device)

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy device tensors to the fastest memory in which the copy fits."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def capture(self, function: Function) -> CapturedFunction | None:
        """Return a function whose kernels are launched together, or None if unsupported."""
        return None

    def time_calls(self, work: Callable[[], object], *, calls: int) -> float:
        """Time consecutive calls, in seconds, synchronizing before and after."""
        self.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        self.synchronize()
        return time.perf_counter() - started

    def autocast(self, precision: str) -> AbstractContextManager[None]:
        """Return the context for a forward pass in ``fp32``, ``bf16`` or ``fp16``."""
        context: AbstractContextManager[None] = torch.autocast(
            self.torch_device.type, dtype=_DTYPES[precision], enabled=precision != "fp32"
        )
        return context

    def choose_attention(self, *, longest_tokens: int | None) -> None:
        """Choose attention kernels for the longest padded length; None restores the defaults."""

    def make_group(self) -> distributed.ProcessGroup | None:
        """Return the group for collectives, or None for the default group. All ranks call it."""
        return None

    def random_state(self) -> dict[str, torch.Tensor]:
        """Return the random generator states, as uint8 tensors on the CPU."""
        if self.torch_device.type == "cpu":
            return {"cpu": torch.get_rng_state()}
        module = torch.get_device_module(self.torch_device)
        return {"cpu": torch.get_rng_state(), "device": module.get_rng_state()}

    def set_random_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the random generators. Ignore a GPU state whose size doesn't match this GPU."""
        torch.set_rng_state(state["cpu"])
        if "device" in state and self.torch_device.type != "cpu":
            module = torch.get_device_module(self.torch_device)
            if state["device"].shape == module.get_rng_state().shape:
                module.set_rng_state(state["device"])


class DeviceMemory(ABC):
    """Device memory as seen by this process. The defaults are for a GPU."""

    # Whether tensors use host memory, which all programs share.
    is_shared = False
    # Whether allocations beyond the free memory are swapped to disk instead of rejected.
    swaps = False
    # Parts of RuntimeError messages when memory runs out.
    out_of_memory_texts: tuple[str, ...]

    def allocated_bytes(self) -> int:
        """Return the memory of live tensors, or of the process if tensors aren't tracked."""
        return torch.accelerator.memory_allocated()

    def peak_bytes(self) -> int | None:
        """Return the peak of ``allocated_bytes``, or None if it isn't tracked."""
        return torch.accelerator.max_memory_allocated()

    def reset_peak(self) -> None:
        """Restart peak tracking, if the device supports it."""
        torch.accelerator.reset_peak_memory_stats()

    def reserved_bytes(self) -> int:
        """Return the memory that this process holds on the device, including its cache."""
        return torch.accelerator.memory_reserved()

    def peak_reserved_bytes(self) -> int | None:
        """Return the peak of ``reserved_bytes``, or None if another process must sample it."""
        return torch.accelerator.max_memory_reserved()

    def total_bytes(self) -> int:
        """Return the total memory of the device."""
        return int(psutil.virtual_memory().total)

    @abstractmethod
    def budget_bytes(self, limit_bytes: int | None) -> int:
        """Return the memory that this process can use, at most the user's limit."""

    @abstractmethod
    def set_memory_limit(self, budget_bytes: int) -> None:
        """Make allocations beyond a budget fail in this process, if the system supports it."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error means that the device ran out of memory."""
        return isinstance(
            error, (MemoryError, torch.OutOfMemoryError, OutOfMemoryElsewhereError)
        ) or (
            isinstance(error, RuntimeError)
            and any(text in str(error) for text in self.out_of_memory_texts)
        )

    def release(self) -> None:
        """Return unused cached memory to the system."""
        torch.accelerator.empty_cache()

    def cache_exceeds_limit(self) -> bool:
        """Return whether the cache is larger than a run needs, without synchronizing."""
        return False


@dataclass(frozen=True)
class BatchShapes:
    """Requirements of a device for batch shapes. None means no limit.

    Args:
        max_shapes: Maximum number of shapes in the steps of a run.
        counts_evaluation: Whether this includes evaluation, at the training batch size.
        min_padded_length: Minimum padded length.
        multiple_of: Every padded length is a multiple of this.
        pads_batches: Whether repeated examples fill the last batch of training steps.
        max_tokens: Maximum tokens of a batch, including padding, with correct results.
        min_examples: 2 if linear layers drop the bias of a single vector, such as a pooled output.
        extraction_tokens: Tokens that frozen layers should process at once to keep a GPU busy.
    """

    max_shapes: int | None = None
    counts_evaluation: bool = False
    min_padded_length: int = 1
    multiple_of: int = 1
    pads_batches: bool = False
    max_tokens: int | None = None
    min_examples: int = 1
    extraction_tokens: int = 0

    def padded_length(self, tokens: int) -> int:
        """Return the smallest padded length for a number of tokens."""
        multiple = -(-tokens // self.multiple_of) * self.multiple_of
        return max(self.min_padded_length, multiple)

    def max_examples(self, *, padded_length: int) -> int | None:
        """Return the maximum examples of a padded length with correct results, or None."""
        return None if self.max_tokens is None else max(1, self.max_tokens // padded_length)

    def evaluated_examples(self, count: int, *, batch_size: int) -> int:
        """Return the size of an evaluation batch after filling it with repeated examples."""
        return max(count, batch_size, self.min_examples) if self.counts_evaluation else count

    def extraction_examples(self, batch_size: int, *, padded_length: int) -> int:
        """Return how many examples frozen layers process at once, at least one evaluation batch."""
        examples = min(self.extraction_tokens // padded_length, _MAX_BATCHES_AT_ONCE * batch_size)
        return max(batch_size, examples)


class Unusable(NamedTuple):
    """Why a device can't be used. ``is_absent``: the machine has no such device."""

    reason: str
    remedy: str
    is_absent: bool = False


def move_to_device(module: nn.Module, torch_device: torch.device) -> None:
    """Move a module to a device unless it is already there, because fake tensors can't be moved."""
    tensors = (*module.parameters(), *module.buffers())
    if any(tensor.device.type != torch_device.type for tensor in tensors):
        module.to(torch_device)


def why_operation_fails(torch_device: torch.device) -> str | None:
    """Return why a small matrix product fails or is wrong on a device, or None if correct."""
    try:
        ones = torch.ones(8, 8, device=torch_device)
        total = (ones @ ones).sum().item()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None if total == 512 else f"the sum of an 8 by 8 product is {total}, not 512"


@contextmanager
def torch_state_kept() -> Iterator[None]:
    """Enable gradients, and restore PyTorch's state in this process afterwards.

    The state includes random generators, the number of threads, and attention kernels.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module = torch.get_device_module(accelerator) if accelerator else torch
    # A GPU that this process hasn't used has no random state, only a seed. MPS always has one.
    is_used = getattr(module, "is_initialized", lambda: True)()
    states = [(each, each.get_rng_state()) for each in ([torch, module] if is_used else [torch])]
    seed, threads = torch.initial_seed(), torch.get_num_threads()
    uses_cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.manual_seed(seed)
        for each, state in states:
            each.set_rng_state(state)
        if torch.get_num_threads() != threads:  # setting it also turns MKL's own choice off
            torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Disable TF32 for fp32 products, which rounds factors from 23 to 10 bits."""
    of_matrices = torch.get_float32_matmul_precision()
    of_convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(of_matrices)
        torch.backends.cudnn.allow_tf32 = of_convolutions


@dataclass
class BatchSize:
    """The number of examples per pass on a device. ``name`` is for messages."""

    examples: int
    name: str
    device: Device

    def retry_on_out_of_memory(self, attempt: Callable[[int], Result]) -> Result:
        """Return the result of a function. If memory runs out, halve the examples and retry."""
        while True:
            try:
                return attempt(self.examples)
            except (RuntimeError, MemoryError) as error:
                self.raise_unless_smaller_fits(error)
            # Not in the except block, whose traceback keeps the tensors alive.
            self.halve()

    def raise_unless_smaller_fits(self, error: Exception) -> None:
        """Raise an error unless memory ran out with more than one example."""
        if not self.device.memory.is_out_of_memory(error):
            raise error
        if self.examples == 1:
            raise BatchDoesNotFitError(
                f"{self.device.name} ran out of memory with a single example",
                remedy="shorten the texts with --max-length, use --gradient-checkpointing, "
                "--freeze-core, a smaller --model or another --device",
            ) from error

    def halve(self) -> None:
        """Halve the batch size permanently, and free the cache."""
        self.device.memory.release()
        before, self.examples = self.examples, self.examples // 2
        change = f"the {self.name} is now {self.examples} instead of {before}"
        emit(events.WarningMessage(f"{self.device.name} ran out of memory: {change}"))

    def clamp(self, *, padded_length: int) -> None:
        """Limit the batch size to the largest that the device computes correctly at a length."""
        most = self.device.shapes.max_examples(padded_length=padded_length)
        if most is None or self.examples <= most:
            return
        before, self.examples = self.examples, most
        most_tokens = self.device.shapes.max_tokens
        reason = f"batches of more than {most_tokens:,} tokens are computed incorrectly"
        change = f"the {self.name} is {most} instead of {before}"
        emit(events.WarningMessage(f"{change}, because {reason} on this chip"))
