"""Which rows of the table of known faults affect a Mac."""

import re

import pytest

from finetune.devices.mps.faults import known_faults

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
def test_a_fault_matches_its_versions_and_chips(
    number: int, changes: dict[str, object], matches: bool
) -> None:
    faults = known_faults(**M4 | changes)  # type: ignore[arg-type]
    assert any(fault.finding.endswith(f"/{number}") for fault in faults) is matches


def test_each_row_has_a_link_and_says_what_to_do() -> None:
    checks = list(known_faults(torch_version="2.13", macos="26", chip=None))
    statuses = [check.status for check in checks]
    assert statuses == sorted(statuses, reverse=True)
    for check in checks:
        assert re.search(r": https://github.com/\S+/\d+$", check.finding)
        assert bool(check.remedy) is (check.status == "warning")
