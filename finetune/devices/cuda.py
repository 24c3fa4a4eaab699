"""An NVIDIA GPU."""

from collections.abc import Mapping, Sequence

import torch

from finetune.devices.base import (
    Unusable,
    gibibytes,
    mentions,
    round_up_to_8,
    why_operation_fails,
)

_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)

# By what PyTorch says when the first operation on the GPU fails.
_UNUSABLE = {
    "Found no NVIDIA driver": Unusable(
        "CUDA needs an NVIDIA driver, and none is installed",
        remedy="install the driver of your GPU from nvidia.com/drivers, or use --device cpu",
        is_absent=True,
    ),
    "driver on your system is too old": Unusable(
        f"the NVIDIA driver is too old for PyTorch {torch.__version__}",
        remedy="update the driver, or install a PyTorch for an older CUDA from pytorch.org",
    ),
    "No CUDA GPUs are available": Unusable(
        "no NVIDIA GPU is visible",
        remedy="compare nvidia-smi -L with CUDA_VISIBLE_DEVICES, or use --device cpu",
        is_absent=True,
    ),
}


class CudaDevice:
    """An NVIDIA GPU: the one that PyTorch has made current."""

    name = "cuda"
    torch_device = torch.device("cuda")
    has_fused_adamw = True
    pads_rows = False

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties()
        self.description = f"{properties.name}, {gibibytes(properties.total_memory)}"
        self.precisions: tuple[str, ...] = (
            ("fp32", "bf16", "fp16") if torch.cuda.is_bf16_supported() else ("fp32", "fp16")
        )

    def widths(self, longest_tokens: int) -> Sequence[int]:
        """Return the multiples of 8: tensor cores work on blocks of 8 numbers of 16 bits."""
        return range(8, round_up_to_8(longest_tokens) + 1, 8)

    def synchronize(self) -> None:
        """Wait until the GPU has done what it was given."""
        torch.cuda.synchronize()

    def used_bytes(self) -> int:
        """Return the memory of live tensors; the allocator's cache is free for any of them."""
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """Return the most memory that live tensors took."""
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        torch.cuda.reset_peak_memory_stats()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether PyTorch's allocator, the driver or cuBLAS got no memory."""
        return isinstance(error, torch.OutOfMemoryError) or mentions(error, _OUT_OF_MEMORY)

    def release_memory(self) -> None:
        """Give the allocator's free blocks back to the driver."""
        torch.cuda.empty_cache()

    def random_state(self) -> dict[str, torch.Tensor]:
        """Return what the random numbers to come depend on."""
        return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}

    def set_random_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with the random numbers where the state was taken."""
        torch.set_rng_state(state["cpu"])
        # A checkpoint that the CPU wrote has no state of a GPU.
        if "device" in state:
            torch.cuda.set_rng_state(state["device"])


def why_not_usable() -> Unusable | None:
    """Return why no NVIDIA GPU can be used here, or None if a small operation on one works."""
    if torch.version.cuda is None:
        return Unusable(
            f"PyTorch {torch.__version__} is built without CUDA",
            remedy="install a PyTorch with CUDA from pytorch.org, or use --device cpu",
            is_absent=True,
        )
    failure = why_operation_fails(CudaDevice.torch_device)
    if failure is None:
        return None
    for text, unusable in _UNUSABLE.items():
        if text in failure:
            return unusable
    return Unusable(
        f"an operation on the NVIDIA GPU fails: {failure}",
        remedy="see nvidia-smi for what occupies the GPU and pytorch.org for a PyTorch that "
        "supports it, or use --device cpu",
    )
