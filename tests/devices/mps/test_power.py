"""What macOS prints of its power and heat, by fake commands: no Mac is here."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from finetune.devices.mps import power
from finetune.devices.mps.power import kept_awake, power_facts, why_slowed

PMSET = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 powernap             1
 sleep                1 (sleep prevented by caffeinate)
 {mode}         {value}
 displaysleep         2
"""


@pytest.fixture(autouse=True)
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "is_mac", lambda: True)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    print_power(tmp_path, mode="lowpowermode", value=0)
    print_heat(tmp_path, level=0)


def print_power(folder: Path, *, mode: str, value: int) -> None:
    write_command(folder / "pmset", PMSET.format(mode=mode, value=value))


def print_heat(folder: Path, *, level: int) -> None:
    write_command(folder / "notifyutil", f"com.apple.system.thermalpressurelevel {level}\n")


def write_command(path: Path, output: str) -> None:
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{output}EOF\n")
    path.chmod(0o755)


def test_a_cool_desktop_mac_is_not_slowed_down() -> None:
    assert power_facts() == {"low_power_mode": "off", "thermal_pressure": "nominal"}
    assert why_slowed() is None


def test_the_battery_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    battery = SimpleNamespace(percent=57, power_plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert power_facts()["power_source"] == "battery, charged to 57%"


@pytest.mark.parametrize("mode", ["lowpowermode", "powermode"])
def test_low_power_mode_slows_a_mac_down(mode: str, tmp_path: Path) -> None:
    print_power(tmp_path, mode=mode, value=1)
    assert power_facts()["low_power_mode"] == "on"
    assert why_slowed() == "the Mac is in Low Power Mode"


def test_heat_slows_a_mac_down(tmp_path: Path) -> None:
    print_heat(tmp_path, level=2)
    assert why_slowed() == "the Mac is hot: its thermal pressure is heavy"


def test_what_macos_does_not_say_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_command(tmp_path / "pmset", "Currently in use:\n sleep 1\n")
    (tmp_path / "notifyutil").unlink()
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert power_facts() == {}


FAKE = """#!/bin/sh
trap 'echo ended >> {log}; exit' TERM
echo "$@" > {log}
while true; do sleep 0.01; done
"""


def test_a_mac_is_kept_awake_for_this_process_until_the_work_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, program = tmp_path / "log", tmp_path / "caffeinate"
    program.write_text(FAKE.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(power, "is_mac", lambda: True)
    with kept_awake():
        while not log.exists() or not log.read_text():
            time.sleep(0.01)
    assert log.read_text() == f"-i -w {os.getpid()}\nended\n"
