"""Python and the packages, against the ranges that this distribution declares."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from finetune.devices.check import Check
from finetune.runs.environment import PACKAGES

_DISTRIBUTION = "finetune-mps"


def check_python() -> Check:
    """Say whether this Python is one that the distribution is made for."""
    found, needed = platform.python_version(), metadata(_DISTRIBUTION)["Requires-Python"]
    if SpecifierSet(needed).contains(found, prereleases=True):
        return Check("python", "ok", found)
    return Check("python", "failure", f"{found}, and {needed} is needed", "install a newer Python")


def check_packages() -> Iterator[Check]:
    """Yield a failure for each package that is missing or outside its range, or one ok."""
    failures = list(filter(None, map(_check_package, _required())))
    if failures:
        yield from failures
        return
    installed = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    yield Check("packages", "ok", installed)


def _required() -> Iterator[Requirement]:
    """Yield what the distribution can't do without on this machine."""
    for line in requires(_DISTRIBUTION) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _check_package(requirement: Requirement) -> Check | None:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        finding = f"{requirement.name} is not installed"
    else:
        if requirement.specifier.contains(found, prereleases=True):
            return None
        finding = f"{requirement.name} {found} is outside {requirement.specifier}"
    wanted = f"{requirement.name}{requirement.specifier}"
    return Check("packages", "failure", finding, f"pip install '{wanted}'")
