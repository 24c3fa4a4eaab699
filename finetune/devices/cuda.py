"""An NVIDIA GPU and its memory."""

import os
from collections.abc import Mapping

import torch
from torch import distributed

from finetune.devices.base import BatchShapes, Device, DeviceMemory, Unusable, why_operation_fails
from finetune.devices.captured import CapturedFunction, Function
from finetune.devices.host import gibibytes
from finetune.errors import UsageError

# Memory for kernels that the driver loads later, outside of PyTorch's allocator.
_RESERVE_BYTES = 512 * 2**20

# Fraction of the free GPU memory for one snapshot. There can be three: the best model, the
# checkpoint being written, and the next checkpoint.
_MAX_SNAPSHOT_SHARE = 0.2

_MAX_WITHOUT_CUDNN = 96

# Tensor cores work on multiples of 8. Capturing a shape takes less than 0.1 s on an H200, and pays
# off only for repeated shapes, so incomplete batches are filled. In an extraction, the widest
# activation of BERT-base takes 200 MB.
CAPTURED_SHAPES = BatchShapes(
    max_shapes=16, min_padded_length=8, multiple_of=8, pads_batches=True, extraction_tokens=2**14
)

# PyTorch messages if the machine has no GPU.
_NO_GPU_TEXTS = ("Found no NVIDIA driver", "No CUDA GPUs are available")


class CudaDevice(Device):
    """The current NVIDIA GPU. If a host has several, each process has its own."""

    name = "cuda"
    torch_device = torch.device("cuda")
    captures = True
    # Short steps would wait for copies of their inputs. Features of this many tokens take 50 MB
    # with BERT-base.
    prefetch_tokens = 2**14

    @staticmethod
    def why_not_usable() -> Unusable | None:
        if torch.version.cuda is None:
            return Unusable(
                f"PyTorch {torch.__version__} is built without CUDA",
                remedy="install a PyTorch with CUDA from pytorch.org, or use --device cpu",
                is_absent=True,
            )
        if torch.cuda.is_available():
            _take_own_gpu()
        failure = why_operation_fails(CudaDevice.torch_device)
        if failure is None:
            return None
        return Unusable(
            f"no NVIDIA GPU can be used: {failure}",
            remedy="compare nvidia-smi with CUDA_VISIBLE_DEVICES, install a newer driver from "
            "nvidia.com/drivers, install a PyTorch build for your driver from pytorch.org, or use "
            "--device cpu",
            is_absent=any(text in failure for text in _NO_GPU_TEXTS),
        )

    def __init__(self) -> None:
        _take_own_gpu()
        properties = torch.cuda.get_device_properties()
        self.description = f"{properties.name}, {gibibytes(properties.total_memory)}"
        # Before Ampere, bf16 is emulated and slower than fp32.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        self.precisions = ("fp32", "bf16", "fp16") if has_bf16 else ("fp32", "fp16")
        self.memory = CudaMemory()
        self.shapes = CAPTURED_SHAPES

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy through pinned memory, because other copies wait for the GPU."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy on the GPU, which takes 1 ms instead of 200 ms for the weights of BERT-base."""
        free_bytes, _ = torch.cuda.mem_get_info()
        if sum(tensor.nbytes for tensor in tensors.values()) > _MAX_SNAPSHOT_SHARE * free_bytes:
            return super().snapshot(tensors)
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def capture(self, function: Function) -> CapturedFunction:
        return CapturedFunction(function, is_out_of_memory=self.memory.is_out_of_memory)

    def choose_attention(self, *, longest_tokens: int | None) -> None:
        """Use cuDNN attention only for long texts.

        It is 28% faster at 512 tokens, 3% at 128, and 4 to 9% slower up to 40 (BERT-base, bf16,
        H200). It also compiles its kernels, which takes 2.4 s for the first shape and 0.15 s for
        each other.
        """
        torch.backends.cuda.enable_cudnn_sdp(
            longest_tokens is None or longest_tokens > _MAX_WITHOUT_CUDNN
        )

    def make_group(self) -> distributed.ProcessGroup:
        """Return an NCCL group, whose all-reduce can be captured."""
        gpu = str(torch.cuda.get_device_properties().uuid)
        gpus = [gpu] * distributed.get_world_size()
        distributed.all_gather_object(gpus, gpu)
        if len(set(gpus)) < len(gpus):
            raise UsageError("several ranks share one GPU", remedy="start one process per GPU")
        # All ranks would register the buffers of a captured all-reduce together, during a capture
        # in which one of them may run out of memory.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        group: distributed.ProcessGroup = distributed.new_group(backend="nccl")
        return group


class CudaMemory(DeviceMemory):
    """The memory of the current GPU, as counted by PyTorch's allocator."""

    # Messages of the allocator, the driver and cuBLAS.
    out_of_memory_texts = (
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def budget_bytes(self, limit_bytes: int | None) -> int:
        """Return the memory that the allocator can hold, excluding the 300 MB CUDA context."""
        free_bytes, _ = torch.cuda.mem_get_info()
        available_bytes = max(0, free_bytes - _RESERVE_BYTES) + torch.cuda.memory_reserved()
        return available_bytes if limit_bytes is None else min(available_bytes, limit_bytes)

    def set_memory_limit(self, budget_bytes: int) -> None:
        total_bytes = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total_bytes))


def _take_own_gpu() -> None:
    """Make the GPU of the local rank current. ``make_group`` rejects shared GPUs."""
    if local_rank := int(os.environ.get("LOCAL_RANK") or 0):
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
