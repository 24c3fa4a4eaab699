"""The batch sizes that ``find-batch`` finds for the article's rows."""

from collections.abc import Iterable

from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.find import Search, find_parts
from finetune.bench.bert import CLASSES
from finetune.bench.published import ARTICLE_TEXTS, ARTICLE_TOKENS
from finetune.bench.training import MODES
from finetune.config.schema import SearchConfig
from finetune.devices.base import Device
from finetune.errors import TrialFailed
from finetune.events import Emit, WarningMessage
from finetune.model.shape import load_shape

# For each device and mode.
_SEARCH_SECONDS = 30.0
MAX_SEARCH_SECONDS = len(MODES) * _SEARCH_SECONDS
"""Of one device."""


def find_article_sizes(devices: Iterable[Device], *, emit: Emit) -> dict[str, dict[str, int]]:
    """Return the recommended batch size of each device and mode; without those where none fits."""
    architecture = architecture_of(load_shape("bert-base-uncased", revision=None).to_dict())
    options = SearchConfig(time_limit=_SEARCH_SECONDS)
    found: dict[str, dict[str, int]] = {}
    for device in devices:
        for mode in MODES:
            case = Case(
                device.name, architecture, CLASSES, mode, ARTICLE_TOKENS, precision="fp32",
                optimizer="adamw", gradient_checkpointing=False,
            )  # fmt: skip
            # On two cores a trial of four rows takes longer than the search may.
            search = Search(device, options, ARTICLE_TEXTS, first=1, cache=None, emit=emit)
            try:
                size = find_parts(case, search, stores_features=False).recommended
            except TrialFailed as error:
                emit(WarningMessage(error.message, remedy=error.remedy))
                continue
            if size:
                found.setdefault(device.name, {})[mode] = size
    return found
