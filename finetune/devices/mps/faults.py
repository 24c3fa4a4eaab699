"""Known faults of MPS, by the versions of PyTorch and macOS and the chips that have them."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import yaml
from packaging.specifiers import SpecifierSet

from finetune.devices.check import Check


@dataclass(frozen=True)
class KnownFault:
    """A row of ``known_faults.yaml``: versions with the fault, effect and remedy."""

    link: str
    effect: str
    avoided: str = ""
    remedy: str = ""
    torch: str = ""
    macos: str = ""
    chips: tuple[int, ...] = ()

    def check(self) -> Check:
        """Return the row as a line of ``finetune doctor``."""
        if self.avoided:
            return Check("known_fault", "ok", f"{self.effect}; {self.avoided}: {self.link}")
        return Check("known_fault", "warning", f"{self.effect}: {self.link}", self.remedy)


def known_faults(*, torch_version: str, macos: str, chip: int | None) -> Iterator[KnownFault]:
    """Yield the faults of a Mac, those that need attention first; None is an unknown chip."""
    text = (resources.files("finetune.devices.mps") / "known_faults.yaml").read_text("utf-8")
    faults = [KnownFault(**row) for row in yaml.safe_load(text)]
    for fault in sorted(faults, key=lambda fault: bool(fault.avoided)):
        versions = ((fault.torch, torch_version), (fault.macos, macos))
        has_versions = all(
            SpecifierSet(affected).contains(version, prereleases=True)
            for affected, version in versions
        )
        if has_versions and (not fault.chips or chip is None or chip in fault.chips):
            yield fault
