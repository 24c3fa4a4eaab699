"""What a run's figures depend on besides its configuration."""

import platform
from importlib.metadata import version
from typing import Any

from finetune.devices.mps.power import power_facts

PACKAGES = (
    "finetune-mps",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "evaluate",
    "numpy",
    "scikit-learn",
)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    return {package: version(package) for package in PACKAGES}


def describe_environment() -> dict[str, Any]:
    """Return the versions of Python, the system and the packages, and what power a Mac has now."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        **power_facts(),
    }
