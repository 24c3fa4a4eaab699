"""The batch sizes of a run, searched for where they are ``auto``."""

from dataclasses import dataclass, replace
from pathlib import Path

from finetune.batch_finder.case import Case, Part, architecture_of
from finetune.batch_finder.find import Bounds
from finetune.batch_finder.parts import search_part
from finetune.config.schema import SearchConfig
from finetune.config.sizes import parse_size
from finetune.devices.base import Device
from finetune.events import Emit, Stage
from finetune.model.load import Classifier
from finetune.model.mode import Mode


@dataclass(frozen=True)
class SizeRequest:
    """A run whose batch sizes are searched for.

    Args:
        device: Where it trains.
        classifier: The model.
        mode: What trains.
        padded_length: Tokens of its longest batch, padding included.
        precision: Of the arithmetic.
        batch_size: Largest of training worth trying: the examples of an update.
        eval_batch_size: Largest worth trying where features are extracted.
        stores_features: Whether features of the frozen layers are stored.
    """

    device: Device
    classifier: Classifier
    mode: Mode
    padded_length: int
    precision: str
    batch_size: int
    eval_batch_size: int
    stores_features: bool


@dataclass(frozen=True)
class FoundSizes:
    """The batch sizes of a run, both of which have been probed.

    Args:
        training: Examples of a forward and backward.
        evaluation: Examples of a forward of evaluation and feature extraction.
    """

    training: int
    evaluation: int


def find_sizes(
    request: SizeRequest, options: SearchConfig, *, cache: Path, emit: Emit
) -> FoundSizes:
    """Search for the batch sizes of a run; mostly one probe of the largest size is enough.

    Args:
        request: The run.
        options: How the search is limited.
        cache: Folder of the results of earlier searches.
        emit: Receives progress events.

    Raises:
        BatchDoesNotFit: If not even one example fits.
        ProbeFailed: If a probe failed for another reason than memory.
    """
    case = Case(
        device=request.device.name,
        architecture=architecture_of(request.classifier.model.config.to_dict()),
        classes=len(request.classifier.class_names),
        mode=request.mode,
        padded_length=request.padded_length,
        precision=request.precision,
    )

    def recommended(part: Part, most: int) -> int:
        bounds = bounds_of(options, limit=most, first=most)
        return search_part(
            replace(case, part=part), device=request.device, bounds=bounds, cache=cache, emit=emit
        ).recommended

    emit(Stage("searching for the batch size"))
    if request.stores_features:
        evaluation = recommended("features", request.eval_batch_size)
        found = FoundSizes(recommended("trainable", request.batch_size), evaluation)
    else:
        training = recommended("whole", request.batch_size)
        found = FoundSizes(training, training)
    emit(Stage(f"batch size: {found.training}, and {found.evaluation} without gradients"))
    return found


def bounds_of(options: SearchConfig, *, limit: int, first: int | None) -> Bounds:
    """Return where a search with these options ends.

    Raises:
        ConfigurationInvalid: If the limit of memory is no size.
    """
    return Bounds(
        limit=limit,
        first=first,
        memory_limit_bytes=None
        if options.memory_limit is None
        else parse_size(options.memory_limit, origin="--memory-limit"),
        time_limit_seconds=options.time_limit,
    )
