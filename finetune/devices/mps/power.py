"""A Mac's power: it is kept awake while it works, and may be slowed by its battery or heat."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from finetune.devices.host import is_mac

# OSThermalPressureLevel of macOS, from 0 on.
_THERMAL_PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_THERMAL_COMMAND = "notifyutil -g com.apple.system.thermalpressurelevel"
# Macs with High Power Mode have ``powermode`` instead, of which 1 is Low Power Mode too.
_LOW_POWER_MODE = r"^\s*(?:low)?powermode\s+(\d+)"


@contextmanager
def kept_awake() -> Iterator[None]:
    """Keep a Mac from sleeping when idle, also while Ctrl-C saves the run."""
    program = shutil.which("caffeinate") if is_mac() else None
    if program is None:
        yield
        return
    with subprocess.Popen(
        [program, "-i", "-w", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            yield
        finally:
            process.terminate()


def power_facts() -> dict[str, str]:
    """Return power source, Low Power Mode and thermal pressure, as far as macOS reports them."""
    facts: dict[str, str] = {}
    if not is_mac():
        return facts
    if battery := psutil.sensors_battery():
        source = "adapter" if battery.power_plugged else "battery"
        facts["power_source"] = f"{source}, charged to {battery.percent:.0f}%"
    if (mode := _read_number("pmset -g", _LOW_POWER_MODE)) is not None:
        facts["low_power_mode"] = "on" if mode == 1 else "off"
    level = _read_number(_THERMAL_COMMAND, r"(\d+)\s*$")
    if level is not None and level < len(_THERMAL_PRESSURES):
        facts["thermal_pressure"] = _THERMAL_PRESSURES[level]
    return facts


def why_slowed() -> str | None:
    """Return why this Mac computes more slowly now than it could, or None."""
    facts = power_facts()
    if facts.get("low_power_mode") == "on":
        return "the Mac is in Low Power Mode"
    pressure = facts.get("thermal_pressure", "nominal")
    return None if pressure == "nominal" else f"the Mac is hot: its thermal pressure is {pressure}"


def _read_number(command: str, pattern: str) -> int | None:
    """Return a number in a command's output, None where the command or the number is missing."""
    found = re.search(pattern, subprocess.getoutput(command), re.MULTILINE)
    return int(found[1]) if found else None
