from dataclasses import replace

import pytest
from machines import INTEL_MAC, LINUX, LINUX_WITH_CUDA, Machine, a_mac, pretend

from finetune.devices import host


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
