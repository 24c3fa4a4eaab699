from dataclasses import replace

import pytest
from machines import INTEL_MAC, LINUX, LINUX_WITH_CUDA, ROSETTA, a_mac, pretend

from finetune.doctor.machine import check_bf16, check_cpu, check_memory, check_system


def test_a_processor_is_told_by_its_kind_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(a_mac(chip="Apple M4 Max"), monkeypatch)
    assert check_cpu().finding == "arm64, Apple M4 Max"
    pretend(LINUX, monkeypatch)
    assert check_cpu().finding == "x86_64, AMD EPYC 7763"


def test_a_processor_without_a_name_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(replace(LINUX, processor="aarch64", cpuinfo=""), monkeypatch)
    assert check_cpu().finding == "aarch64"


def test_rosetta_is_told_although_python_sees_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(ROSETTA, monkeypatch)
    check = check_cpu()
    assert check.status == "warning"
    assert check.finding.startswith("x86_64, Apple M1: ")
    assert "Rosetta" in check.finding
    assert "CONDA_SUBDIR=osx-arm64 conda create -n finetune python=3.11" in check.remedy


def test_an_intel_mac_is_sent_to_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(INTEL_MAC, monkeypatch)
    assert check_cpu().remedy.startswith("use --device cpu")
    assert check_system().status == "ok"


def test_macos_is_told_as_the_mac_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python itself says 16.0 of macOS 26 where it was built for an older one.
    pretend(replace(a_mac(macos="26.0"), macos="16.0"), monkeypatch)
    assert check_system().finding == "macOS 26.0"


@pytest.mark.parametrize(
    ("macos", "place"), [("12.3", "System Preferences"), ("13.6.9", "System Settings > General")]
)
def test_an_old_macos_is_to_be_updated_where_it_keeps_its_updates(
    macos: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(a_mac(macos=macos), monkeypatch)
    check = check_system()
    assert check.status == "warning"
    assert "needs macOS 14 or newer" in check.finding
    assert check.remedy == f"update macOS: {place} > Software Update"


def test_bf16_is_told_by_the_names_of_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(LINUX_WITH_CUDA, monkeypatch)
    assert check_bf16().finding.endswith(": avx512_bf16, amx_bf16")
    pretend(LINUX, monkeypatch)
    assert "no bf16 instructions" in check_bf16().finding


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(replace(LINUX, memory_gib=8.0, available_gib=2.5), monkeypatch)
    check = check_memory()
    assert check.status == "warning"
    assert check.finding == "2.5 of 8.0 GiB available; to train all of BERT-base takes 3.3"
    assert "--freeze-core" in check.remedy
