"""Finds PyTorch operators with an MPS kernel, in the list that generates PyTorch.

PyTorch wheels contain ``native_functions.yaml`` for every platform, so this needs no Mac.
"""

import functools
from importlib import resources
from typing import Any, Literal

import yaml

Status = Literal["native", "composite", "missing"]

_COMPOSITES = {
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
}


def status_of(name: str) -> Status:
    """Return how MPS runs an operator: by a kernel, as a composite of others, or not at all."""
    return _statuses().get(name.removeprefix("aten::"), "missing")


@functools.cache
def _statuses() -> dict[str, Status]:
    packaged = resources.files("torchgen") / "packaged" / "ATen" / "native"
    # libyaml parses the 16,000 lines in 0.1 s, ten times as fast as the Python parser.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (packaged / "native_functions.yaml").read_text("utf-8")
    entries: list[dict[str, Any]] = yaml.load(text, Loader=loader)
    by_name = {entry["func"].partition("(")[0]: entry for entry in entries}

    def status(entry: dict[str, Any]) -> Status:
        # A structured operator runs the kernel of its variant that writes into a given tensor.
        if delegate := entry.get("structured_delegate"):
            return status(by_name[delegate])
        keys = {key.strip() for listed in entry.get("dispatch", {}) for key in listed.split(",")}
        if "MPS" in keys:
            return "native"
        return "composite" if not keys or keys & _COMPOSITES else "missing"

    statuses = {name: status(entry) for name, entry in by_name.items()}
    for entry in entries:
        for variant in entry.get("autogen", "").split(","):
            # Generated variants call the original operator.
            statuses.setdefault(variant.strip(), "composite")
    return statuses
