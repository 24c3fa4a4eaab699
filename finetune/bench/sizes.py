"""The batch sizes that ``find-batch`` finds for the article's rows."""

from collections.abc import Iterable

from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.find import Bounds, Finder
from finetune.batch_finder.parts import search_parts
from finetune.bench.bert import CLASSES
from finetune.bench.published import ARTICLE_TEXTS, ARTICLE_TOKENS
from finetune.bench.training import MODES
from finetune.devices.base import Device
from finetune.errors import ProbeFailed
from finetune.events import Emit, WarningMessage
from finetune.model.shape import load_shape

# For each device and mode.
_SEARCH_SECONDS = 30.0
MAX_SEARCH_SECONDS = len(MODES) * _SEARCH_SECONDS
"""Of one device."""


def find_article_sizes(devices: Iterable[Device], *, emit: Emit) -> dict[str, dict[str, int]]:
    """Return the recommended batch size of each device and mode; without those where none fits."""
    architecture = architecture_of(load_shape("bert-base-uncased", revision=None).to_dict())
    bounds = Bounds(
        limit=ARTICLE_TEXTS,
        # On two cores a probe of four rows takes longer than the search may.
        first=1,
        memory_limit_bytes=None,
        time_limit_seconds=_SEARCH_SECONDS,
    )
    found: dict[str, dict[str, int]] = {}
    for device in devices:
        for mode in MODES:
            case = Case(
                device.name, architecture, CLASSES, mode, ARTICLE_TOKENS, precision="fp32",
                optimizer="adamw", gradient_checkpointing=False,
            )  # fmt: skip
            finder = Finder(device, bounds, cache=None, emit=emit)
            try:
                size = search_parts(case, finder, stores_features=False).recommended
            except ProbeFailed as error:
                emit(WarningMessage(error.message, remedy=error.remedy))
                continue
            if size:
                found.setdefault(device.name, {})[mode] = size
    return found
