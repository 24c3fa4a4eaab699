"""The choices of a device and of a precision, without torch, for the command line."""

from typing import Literal, get_args

DeviceName = Literal["auto", "mps", "cpu", "cuda"]
PrecisionName = Literal["fp32", "bf16", "fp16"]

DEVICE_NAMES: tuple[str, ...] = get_args(DeviceName)
PRECISION_NAMES: tuple[str, ...] = get_args(PrecisionName)
