"""What is left to Accelerate: the user's configuration, and what its trackers ask."""

import accelerate
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from finetune.devices.base import Device
from finetune.errors import UsageError

# Each process has the whole model; TrainingState sums the gradients.
_WHOLE_MODEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def start_accelerate(device: Device) -> None:
    """Start Accelerate on a device; ``UsageError`` if it is configured to split the model."""
    # It keeps the device for the whole life of a process and refuses others, but a process may
    # train twice.
    AcceleratorState._reset_state(reset_partial_state=True)
    is_cpu = device.torch_device.type == "cpu"
    configured = accelerate.Accelerator(cpu=is_cpu, mixed_precision="no").distributed_type
    if configured not in _WHOLE_MODEL:
        raise UsageError(
            f"Accelerate is configured for {configured.value}, and each process of a run has the "
            "whole model",
            remedy="choose multi-GPU or multi-CPU with accelerate config, or use torchrun",
        )
