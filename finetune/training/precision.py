"""``--precision auto``: bf16 if it is correct and fast on this machine, otherwise fp32."""

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from finetune import hub
from finetune.config.schema import AutoTunedOption
from finetune.devices import host
from finetune.devices.base import Device
from finetune.errors import ConfigurationError
from finetune.files import WRITTEN_BY, read_cache_json, write_cache_json
from finetune.model.tensor_store import key_of

# bf16 must be faster by this factor, because timings are noisy.
_GAIN = 1.03
_EXAMPLES, _TOKENS, _HEAD_SIZE = 8, 32, 64
_MAX_SECONDS = 0.6
_NO_INSTRUCTIONS = "the CPU has no bf16 instructions"


def choose_precision(device: Device, *, hidden_size: int, cache: Path) -> AutoTunedOption:
    """Choose fp32 or bf16. Store timings, so that the same PyTorch version repeats its choice."""
    if reason := why_not(device, "bf16"):
        return _choice("fp32", reason)
    if not device.times_bf16:
        reason = "passed the parity test" if device.has_silent_faults else "has instructions"
        return _choice("bf16", f"{device.name} {reason} for it")
    file = cache / f"{_key(device, str(hidden_size))}.json"
    try:
        choice = TypeAdapter(AutoTunedOption).validate_python(read_cache_json(file))
        measured_on = date.fromtimestamp(file.stat().st_mtime)
        return replace(choice, note=f"{choice.note}, measured on {measured_on}")
    except (OSError, ValueError):
        choice = _time_layer(device, hidden_size)
        write_cache_json(file, asdict(choice) | WRITTEN_BY)
        return choice


def _choice(
    precision: str, reason: str, milliseconds: Mapping[str, float] | None = None
) -> AutoTunedOption:
    timings = milliseconds or {}
    return AutoTunedOption("precision", precision, "ms for one encoder layer", timings, reason)


def why_not(device: Device, precision: str) -> str | None:
    """Return a reason not to use a trained model in a precision on this device, or None."""
    if precision == "fp32":
        return None
    if precision not in device.precisions:
        return f"{device.name} can't compute in {precision} here"
    if device.has_silent_faults and not has_parity(device, precision=precision):
        parity = f"finetune doctor --parity --device {device.name} --precision {precision}"
        return f"{parity} has not passed on this machine"
    return _NO_INSTRUCTIONS if is_slow(device, precision) else None


def is_slow(device: Device, precision: str) -> bool:
    """Whether a precision is about 100 times slower than fp32, on a CPU without instructions."""
    return device.times_bf16 and precision == "bf16" and not host.bf16_instructions()


def check_speed(device: Device, precision: str) -> None:
    """Reject bf16 on a CPU without instructions for it."""
    if is_slow(device, precision):
        raise ConfigurationError(
            f"--precision {precision} is slow here: {_NO_INSTRUCTIONS}",
            remedy="drop --precision, or add --no-check-device to use it anyway",
        )


def _time_layer(device: Device, hidden_size: int) -> AutoTunedOption:
    """Time the forward and backward pass of an encoder layer, in less than a second."""
    with torch.random.fork_rng(devices=()):
        heads = hidden_size // _HEAD_SIZE if hidden_size % _HEAD_SIZE == 0 else 1
        layer = nn.TransformerEncoderLayer(
            hidden_size, heads, 4 * hidden_size, dropout=0.0, batch_first=True
        )
        features = torch.randn(_EXAMPLES, _TOKENS, hidden_size, requires_grad=True)

    def run(precision: str) -> None:
        with device.autocast(precision):
            output = layer(features)
        output.float().sum().backward()

    # Use the fastest time of each, because other programs also use the CPU.
    fastest = {"fp32": float("inf"), "bf16": float("inf")}
    ends_at = time.monotonic() + _MAX_SECONDS
    while fastest["bf16"] == float("inf") or time.monotonic() < ends_at:
        for precision, milliseconds in fastest.items():
            seconds = device.time_calls(partial(run, precision), calls=1)
            fastest[precision] = min(milliseconds, 1e3 * seconds)
    times = " and ".join(f"{time:,.1f} ms in {name}" for name, time in fastest.items())
    is_faster = fastest["fp32"] > _GAIN * fastest["bf16"]
    reason = f"an encoder layer takes {times}"
    return _choice("bf16" if is_faster else "fp32", reason, fastest)


def has_parity(device: Device, *, precision: str) -> bool:
    """Return whether ``doctor --parity`` passed in a precision for all compared models."""
    return set(_read_parity(device, precision)[1].values()) == {True}


def note_parity(device: Device, *, precision: str, subject: str, passes: bool) -> None:
    """Store whether a device agrees with the CPU in a precision, per comparison."""
    file, passed = _read_parity(device, precision)
    write_cache_json(file, passed | {subject: passes})


def _read_parity(device: Device, precision: str) -> tuple[Path, dict[str, bool]]:
    file = hub.cache_folder("parity") / f"{_key(device, precision)}.json"
    try:
        return file, TypeAdapter(dict[str, bool]).validate_python(read_cache_json(file))
    except (OSError, ValueError):
        return file, {}


def _key(device: Device, subject: str) -> str:
    machine = (device.description, host.cpu_name(), host.macos_version(), platform.machine())
    return key_of([*machine, f"torch {torch.__version__}", subject])
