import os
import re
import time
from pathlib import Path

import pytest

from finetune.devices import host
from finetune.devices.mps.facts import Mac, find_mac, known_faults, status_of
from finetune.errors import UsageError

GIB = 2**30
# The default PyTorch limit, relative to the memory that Metal recommends.
HIGH_WATERMARK_RATIO = 1.7


@pytest.mark.parametrize(
    ("gibibytes", "max_allowed"),
    # "max allowed" in PyTorch messages: pytorch#105839, #130112, haoheliu/AudioLDM2#20,
    # instructlab#2568, BoBo0037/bobo-fun#8.
    [(8, 9.07), (16, 18.13), (18, 20.40), (32, 36.27), (64, 81.60)],
)
def test_recommended_memory_matches_published_pytorch_limits(
    gibibytes: int, max_allowed: float
) -> None:
    recommended = Mac("", gibibytes * GIB).recommended_bytes
    assert recommended * HIGH_WATERMARK_RATIO / GIB == pytest.approx(max_allowed, abs=0.005)


def test_budget_of_a_small_mac_is_below_the_recommendation_of_metal() -> None:
    small, large = find_mac("m1-8gb"), find_mac("m1-16gb")
    assert small.budget_bytes < small.recommended_bytes
    assert large.budget_bytes == large.recommended_bytes


@pytest.mark.parametrize(
    "name",
    ["m4-max-128gb", "M4 Max 128 GB", "MacBook Pro M4 Max, 128GiB", "128 GB M4Max", "m4_max_128g"],
)
def test_mac_is_found_by_chip_and_memory(name: str) -> None:
    assert find_mac(name) == Mac("m4-max-128gb", 128 * GIB, "m4-max")


@pytest.mark.parametrize("name", ["", "i9-64gb", "m99", "m18gb", "M2 8", "m2 1.5gb"])
def test_name_without_chip_or_memory_is_rejected_with_an_example(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_mac(name)
    assert "m1-8gb" in caught.value.remedy


M4 = {"torch_version": "2.13.0", "macos": "15.5", "chip": 4}


@pytest.mark.parametrize(
    ("number", "changes", "matches"),
    [
        (195163, {}, False),
        (195163, {"chip": 2}, True),
        (195163, {"chip": None}, True),
        (188438, {"chip": 1, "macos": "26.1"}, True),
        (188438, {"chip": 1, "macos": "27.0"}, False),
        (180776, {"chip": 5}, False),
        (180776, {"chip": 5, "torch_version": "2.12.1"}, True),
        (180201, {"torch_version": "2.12.0"}, True),
        (180201, {"torch_version": "2.12.0", "macos": "26.4"}, False),
        (169222, {"torch_version": "2.15.0.dev20261001"}, True),
    ],
)
def test_known_fault_matches_its_versions_and_chips(
    number: int, changes: dict[str, object], matches: bool
) -> None:
    faults = known_faults(**M4 | changes)  # type: ignore[arg-type]
    assert any(fault.finding.endswith(f"/{number}") for fault in faults) is matches


def test_each_known_fault_has_a_link_and_warnings_have_a_remedy() -> None:
    checks = list(known_faults(torch_version="2.13", macos="26", chip=None))
    statuses = [check.status for check in checks]
    assert statuses == sorted(statuses, reverse=True)
    for check in checks:
        assert re.search(r": https://github.com/\S+/\d+$", check.finding)
        assert bool(check.remedy) is (check.status == "warning")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("aten::addmm", "native"),  # by its structured variant, addmm.out
        ("aten::gelu_backward", "native"),  # by gelu_backward.grad_input
        ("aten::linear", "native"),  # also a composite elsewhere
        ("aten::_fused_adamw_", "native"),
        ("aten::embedding", "composite"),  # explicit
        ("aten::dropout", "composite"),  # implicit, without a list of kernels
        ("aten::native_dropout.out", "composite"),  # generated
        ("aten::mode", "missing"),
        ("aten::linalg_eig", "missing"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "missing"),
        ("torchvision::nms", "missing"),
    ],
)
def test_operator_status_follows_native_functions_yaml(name: str, status: str) -> None:
    assert status_of(name) == status


FAKE = """#!/bin/sh
trap 'echo ended >> {log}; exit' TERM
echo "$@" > {log}
while true; do sleep 0.01; done
"""


def test_mac_is_kept_awake_until_the_work_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, program = tmp_path / "log", tmp_path / "caffeinate"
    program.write_text(FAKE.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(host, "is_mac", lambda: True)
    with host.kept_awake():
        while not log.exists() or not log.read_text():
            time.sleep(0.01)
    assert log.read_text() == f"-i -w {os.getpid()}\nended\n"
