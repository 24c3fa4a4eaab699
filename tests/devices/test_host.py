from dataclasses import replace

import pytest
from machines import INTEL_MAC, LINUX, LINUX_WITH_CUDA, MACHINES, ROSETTA, Machine, a_mac, pretend

from finetune.devices import host


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_only_rosetta_is_taken_for_rosetta(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(machine, monkeypatch)
    assert host.is_under_rosetta() == (machine is ROSETTA)


def test_the_version_of_macos_is_the_kernels_or_else_pythons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(ROSETTA, monkeypatch)
    assert host.macos_version() == "14.5"
    pretend(replace(ROSETTA, macos="13.6", sysctls={}), monkeypatch)
    assert host.macos_version() == "13.6"


@pytest.mark.parametrize(
    ("macos", "is_too_old"), [("12.3", True), ("13.6", True), ("14.0", False), ("26.0", False)]
)
def test_macos_14_is_the_oldest(
    macos: str, is_too_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(a_mac(macos=macos), monkeypatch)
    assert host.is_macos_too_old() == is_too_old


@pytest.mark.parametrize(
    ("machine", "instructions"),
    [
        (LINUX, []),
        (LINUX_WITH_CUDA, ["avx512_bf16", "amx_bf16"]),
        (replace(LINUX, cpuinfo="processor\t: 0\nFeatures\t: fp asimd i8mm bf16"), ["bf16"]),
        (replace(LINUX, cpuinfo=""), []),
        (a_mac(chip="Apple M1"), []),
        (a_mac(chip="Apple M2"), ["FEAT_BF16"]),
        (INTEL_MAC, []),
    ],
)
def test_instructions_for_bf16_are_found_by_the_systems_names(
    machine: Machine, instructions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(machine, monkeypatch)
    assert host.bf16_instructions() == instructions
