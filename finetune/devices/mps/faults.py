"""Known faults of MPS, by the versions of PyTorch and macOS and the chips that have them."""

from collections.abc import Iterator
from importlib import resources

import yaml
from packaging.specifiers import SpecifierSet

from finetune.devices.host import Check


def known_faults(*, torch_version: str, macos: str, chip: int | None) -> Iterator[Check]:
    """Yield a check for each row of ``known_faults.yaml`` that affects a Mac; None: unknown chip.

    Faults that need attention come first.
    """
    text = (resources.files("finetune.devices.mps") / "known_faults.yaml").read_text("utf-8")
    for row in sorted(yaml.safe_load(text), key=lambda row: "avoided" in row):
        versions = ((row.get("torch", ""), torch_version), (row.get("macos", ""), macos))
        has_versions = all(
            SpecifierSet(affected).contains(version, prereleases=True)
            for affected, version in versions
        )
        chips = row.get("chips")
        if not has_versions or (chips and chip is not None and chip not in chips):
            continue
        effect, link = row["effect"], row["link"]
        if "avoided" in row:
            yield Check("known_fault", "ok", f"{effect}; {row['avoided']}: {link}")
        else:
            yield Check("known_fault", "warning", f"{effect}: {link}", row.get("remedy", ""))
