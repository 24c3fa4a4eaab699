"""Checks whether this machine is ready."""

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from huggingface_hub import constants
from packaging.requirements import Requirement

from finetune.config.schema import ModelConfig
from finetune.devices import host
from finetune.devices.host import BERT_BASE_BYTES, Check, check_variables, group_limits
from finetune.errors import FinetuneError, ModelNotFoundError, reason_of
from finetune.hub import ask_hub, endpoint
from finetune.runs.manifest import PACKAGES


def check_machine(*, device: str) -> Iterator[Check]:
    """Yield the checks: first those without PyTorch, last the ``device``."""
    yield check_cpu()
    # The GPU check reports a macOS version that is too old.
    name = f"macOS {host.macos_version()}" if host.is_mac() else platform.platform()
    yield Check("system", "ok", name)
    yield Check("python", "ok", platform.python_version())
    yield from check_packages()
    yield check_memory()
    yield check_disk("run_disk", Path.cwd(), "free disk space, or set --output-dir to another disk")
    hub_cache = Path(constants.HF_HUB_CACHE)
    yield check_disk(
        "hub_disk", hub_cache, "free disk space, or set HF_HOME to a folder on another disk"
    )
    yield check_hub()
    yield from check_variables()
    yield from _check_devices(device)


def check_cpu() -> Check:
    """Report the CPU, and whether Python is built for it."""
    finding = ", ".join(filter(None, [platform.machine(), host.cpu_name()]))
    if host.is_under_rosetta():
        finding += ": this Python runs as an Intel program under Rosetta, which hides the GPU"
        return Check("processor", "warning", finding, host.ROSETTA_REMEDY)
    if host.is_mac() and platform.machine() != "arm64":
        finding += ": PyTorch supports only the GPUs of Macs with Apple silicon"
        remedy = "use --device cpu; PyTorch's last packages for Intel Macs are of version 2.2"
        return Check("processor", "warning", finding, remedy)
    return Check("processor", "ok", finding)


def check_packages() -> Iterator[Check]:
    """Yield one failure per missing, conflicting or out-of-range package, or a single 'ok'.

    Another package on PyPI, ``finetune``, has the same import name.
    """
    is_fine = True
    for requirement in map(Requirement, requires("finetune-mps") or ()):
        # Skip packages of extras and of other systems.
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        finding, wanted = f"{requirement.name} is not installed", requirement.specifier
        with suppress(PackageNotFoundError):
            installed = version(requirement.name)
            if wanted.contains(installed, prereleases=True):
                continue
            finding = f"{requirement.name} {installed} is outside {wanted}"
        is_fine = False
        yield Check("packages", "failure", finding, f"pip install '{requirement.name}{wanted}'")
    with suppress(PackageNotFoundError):
        finding = f"another package is installed as finetune: finetune {version('finetune')}"
        remedy = "pip uninstall finetune, then pip install --force-reinstall --no-deps finetune-mps"
        is_fine = False
        yield Check("packages", "failure", finding, remedy)
    if is_fine:
        installed = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
        yield Check("packages", "ok", installed)


def check_memory() -> Check:
    """Report the memory, and whether enough is free for training BERT-base."""
    memory, limits = psutil.virtual_memory(), list(group_limits())
    total_bytes = min([memory.total, *(group.limit_bytes for group in limits)])
    free_bytes = min(
        [memory.available, *(group.limit_bytes - group.used_bytes for group in limits)]
    )
    finding = f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB available"
    has_room = free_bytes >= BERT_BASE_BYTES
    needed = f"; training all of BERT-base needs {BERT_BASE_BYTES / 2**30:.1f} GiB"
    remedy = "close other programs, or train less: --freeze-core, or a smaller --model"
    return Check.warn_unless(has_room, "memory", finding + needed * (not has_room), remedy)


def check_disk(name: str, folder: Path, remedy: str) -> Check:
    """Check that a folder is writable and has space for BERT-base. It need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Check(name, "failure", f"{existing} can't be written", remedy)
    free_bytes = shutil.disk_usage(existing).free
    finding = f"{free_bytes / 1e9:.1f} GB free at {folder}"
    has_room = free_bytes >= BERT_BASE_BYTES
    needed = f"; a run with BERT-base needs up to {BERT_BASE_BYTES / 1e9:.1f} GB"
    return Check.warn_unless(has_room, name, finding + needed * (not has_room), remedy)


def check_hub() -> Check:
    """Report whether the Hub responds. Without it, only cached files can be used."""
    try:
        with suppress(ModelNotFoundError):  # a response too
            ask_hub("model", ModelConfig().model, timeout_seconds=3.0)
    except FinetuneError as error:
        return Check("hub", "warning", error.message, error.remedy)
    return Check("hub", "ok", f"{endpoint()} responds")


def _check_devices(name: str) -> Iterator[Check]:
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        finding = f"PyTorch can't be imported: {reason_of(error)}"
        remedy = "fix the failures above, then run pip install --force-reinstall torch"
        yield Check("device", "failure", finding, remedy)
        return
    from finetune.devices.select import check_gpus, describe_choice

    yield from check_gpus()
    yield describe_choice(name)
