"""Wheel contents, version ranges and pins."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [
    Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines
]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the source archive, and return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return folder


def source_names(folder: str, pattern: str) -> set[str]:
    """Return the files in a repository folder, as paths from the root."""
    names = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern)}
    assert names, f"{folder} holds no {pattern}"
    return names


def test_wheel_contains_code_presets_and_questions(archives: Path) -> None:
    [wheel] = archives.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())

    assert source_names("finetune", "*.py") <= packed
    assert source_names("finetune", "*.j2") <= packed
    assert {"finetune/py.typed", "finetune/data/questions.jsonl"} <= packed
    assert {f"finetune/{name}" for name in source_names("configs", "*.yaml")} <= packed


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_direct_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    pinned = [str(pin.specifier).removeprefix("==") for pin in PINS if pin.name == name]
    assert pinned
    assert all(map(requirement.specifier.contains, pinned))
