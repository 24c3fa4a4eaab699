from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.doctor.packages import check_packages, check_python

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs the metadata of a package in front of all others."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, version: str, *lines: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        header = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*header, *lines]) + "\n")

    return install


def test_this_environment_is_within_the_ranges() -> None:
    [check] = check_packages()
    assert check.status == "ok"
    assert "torch 2." in check.finding
    assert check.finding.startswith("finetune-mps ")


def test_a_package_outside_its_range_is_named_with_the_command_that_helps(
    install: Install,
) -> None:
    install("transformers", "4.57.1")
    [check] = check_packages()
    assert check.status == "failure"
    assert check.finding.startswith("transformers 4.57.1 is outside <")
    assert check.remedy.startswith("pip install 'transformers<")


def test_a_package_that_is_missing_is_named(install: Install) -> None:
    install("finetune_mps", "0.1.0", "Requires-Dist: nosuchpackage<3,>=2")
    [check] = check_packages()
    assert check.status == "failure"
    assert check.finding == "nosuchpackage is not installed"
    assert check.remedy == "pip install 'nosuchpackage<3,>=2'"


def test_each_package_that_does_not_fit_has_its_own_line(install: Install) -> None:
    install("finetune_mps", "0.1.0", "Requires-Dist: nosuchpackage", "Requires-Dist: torch<1")
    assert [check.finding.split()[0] for check in check_packages()] == ["nosuchpackage", "torch"]


def test_extras_and_other_systems_are_not_asked_for(install: Install) -> None:
    install(
        "finetune_mps",
        "0.1.0",
        "Requires-Dist: nosuchpackage; extra == 'offline'",
        "Requires-Dist: nosuchpackage; sys_platform == 'plan9'",
    )
    [check] = check_packages()
    assert check.status == "ok"


def test_a_build_of_a_supported_version_is_supported(install: Install) -> None:
    install("finetune_mps", "0.1.0", "Requires-Dist: torch<2.14,>=2.11")
    install("torch", "2.13.0+cu130")
    [check] = check_packages()
    assert check.status == "ok"
    assert "torch 2.13.0+cu130" in check.finding


def test_an_old_python_is_a_failure(install: Install) -> None:
    assert check_python().status == "ok"
    install("finetune_mps", "0.1.0", "Requires-Python: >=4")
    check = check_python()
    assert check.status == "failure"
    assert ">=4 is needed" in check.finding
