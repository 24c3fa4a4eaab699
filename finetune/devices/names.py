"""The choices of a device and of a precision, without torch, for the command line."""

from typing import Literal, get_args

DeviceName = Literal["auto", "mps", "cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
PrecisionName = Literal["auto", Precision]

DEVICE_NAMES: tuple[str, ...] = get_args(DeviceName)
PRECISIONS: tuple[str, ...] = get_args(Precision)
