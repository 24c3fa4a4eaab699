"""environment.json: what a run's figures depend on besides the values of its options."""

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.devices.mps.power import power_facts
from finetune.files import read_json, write_json
from finetune.runs.details import AutoTunedOption
from finetune.training.precision_result import PrecisionTiming

if TYPE_CHECKING:
    from finetune.runs.preparation import Preparation

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


# Each is parsed from a file.
_version = cache(version)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    return {package: _version(package) for package in PACKAGES}


def write_environment(file: Path, preparation: "Preparation") -> None:
    """Write versions, machine, where options come from, and what was chosen by measurements."""
    import torch

    timing, processes = preparation.precision_timing, preparation.processes
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        **power_facts(),
        "device": preparation.device.description,
        "threads": torch.get_num_threads(),
        "origins": dict(preparation.origins),
        "choices": [asdict(one) for one in preparation.choices],
        **({"processes": processes.count} if processes.count > 1 else {}),
        **({"precision_timing": asdict(timing)} if timing else {}),
    }
    write_json(file, environment)


def restore_threads(file: Path) -> None:
    """Compute with as many CPU threads as the run began with: sums of others differ in their bits.

    ``OMP_NUM_THREADS`` goes first, and a machine with fewer cores keeps its own number.
    """
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        return
    with suppress(OSError, ValueError, KeyError):
        torch.set_num_threads(min(read_json(file)["threads"], os.cpu_count() or 1))


def read_measured(file: Path) -> tuple[Sequence[AutoTunedOption], PrecisionTiming | None]:
    """Return what a run has chosen by measurements; nothing if that can't be read."""
    # The doctor reads the names of packages here, where this one may be missing.
    from pydantic import TypeAdapter

    try:
        found = read_json(file)
        measured = found["choices"], found.get("precision_timing")
        return TypeAdapter(tuple[list[AutoTunedOption], PrecisionTiming | None]).validate_python(
            measured
        )
    except (OSError, ValueError, KeyError, TypeError):
        return (), None
