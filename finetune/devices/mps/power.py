"""What may slow a Mac down: its battery, Low Power Mode, heat. No root is needed to read it."""

import re
import subprocess

import psutil

from finetune.devices.host import is_mac

# OSThermalPressureLevel of macOS, from 0 on.
_THERMAL_PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_THERMAL_COMMAND = ("notifyutil", "-g", "com.apple.system.thermalpressurelevel")
_POWER_COMMAND = ("pmset", "-g")
# Macs with High Power Mode have ``powermode`` instead, of which 1 is Low Power Mode too.
_LOW_POWER_MODE = r"^\s*(?:low)?powermode\s+(\d+)"
_SECONDS = 5


def power_facts() -> dict[str, str]:
    """Return power source, Low Power Mode and thermal pressure, as far as macOS says them.

    Elsewhere than on a Mac there are none.
    """
    if not is_mac():
        return {}
    battery = psutil.sensors_battery()
    if battery is None:
        return _slowing_facts()
    source = "adapter" if battery.power_plugged else "battery"
    return {"power_source": f"{source}, charged to {battery.percent:.0f}%"} | _slowing_facts()


def why_slowed() -> str | None:
    """Return why this Mac computes more slowly now than it could, or None."""
    facts = _slowing_facts() if is_mac() else {}
    if facts.get("low_power_mode") == "on":
        return "the Mac is in Low Power Mode"
    pressure = facts.get("thermal_pressure", "nominal")
    return None if pressure == "nominal" else f"the Mac is hot: its thermal pressure is {pressure}"


def _slowing_facts() -> dict[str, str]:
    facts = {}
    if (mode := _read_number(_POWER_COMMAND, _LOW_POWER_MODE)) is not None:
        facts["low_power_mode"] = "on" if mode == 1 else "off"
    level = _read_number(_THERMAL_COMMAND, r"(\d+)\s*$")
    if level is not None and level < len(_THERMAL_PRESSURES):
        facts["thermal_pressure"] = _THERMAL_PRESSURES[level]
    return facts


def _read_number(command: tuple[str, ...], pattern: str) -> int | None:
    """Return a number of a command's output, None where the command or the number is missing."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(pattern, answer.stdout, re.MULTILINE)
    return int(found[1]) if found else None
