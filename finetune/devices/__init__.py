"""The only package that knows mps, cuda and cpu. This module lists their names without torch."""

from typing import Literal, get_args

DeviceName = Literal["auto", "mps", "cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
PrecisionName = Literal["auto", Precision]
# onnx and onnx-int8 select a file for onnxruntime.
Runtime = Literal["auto", "torch", "onnx", "onnx-int8"]

DEVICE_NAMES: tuple[str, ...] = get_args(DeviceName)
PRECISIONS: tuple[str, ...] = get_args(Precision)
