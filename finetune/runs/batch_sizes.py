"""The batch sizes of a run, searched for where they are ``auto``."""

from dataclasses import dataclass, replace

from finetune.batch_finder.case import Case, Part, architecture_of
from finetune.batch_finder.find import Bounds
from finetune.batch_finder.parts import search_part
from finetune.config.schema import SearchConfig
from finetune.config.sizes import parse_size
from finetune.events import Emit, Stage
from finetune.runs.features import cache_folder, make_feature_extractor, stores_features
from finetune.runs.plan import TrainingPlan
from finetune.runs.preparation import Preparation


@dataclass(frozen=True)
class FoundSizes:
    """The batch sizes of training, and of evaluation and feature extraction: both were probed."""

    training: int
    evaluation: int


def find_sizes(preparation: Preparation, plan: TrainingPlan, *, emit: Emit) -> FoundSizes:
    """Search for the batch sizes of a run.

    Each search begins with the largest size worth trying, that of an update or of an evaluation, so
    that mostly one probe is enough.

    Raises:
        BatchDoesNotFit: If not even one example fits.
        ProbeFailed: If a probe failed for another reason than memory.
    """
    config, classifier = preparation.config, preparation.classifier
    case = Case(
        device=preparation.device.name,
        architecture=architecture_of(classifier.model.config.to_dict()),
        classes=len(classifier.class_names),
        mode=preparation.mode,
        padded_length=plan.padded_lengths[-1],
        precision=config.training.precision,
    )

    def recommended(part: Part, most: int) -> int:
        bounds = bounds_of(config.search, limit=most, first=most)
        return search_part(
            replace(case, part=part),
            device=preparation.device,
            bounds=bounds,
            cache=cache_folder(config.cache, "batches"),
            emit=emit,
        ).recommended

    emit(Stage("searching for the batch size"))
    if stores_features(config.cache, case.mode) and make_feature_extractor(classifier) is not None:
        evaluation = recommended("features", config.training.eval_batch_size)
        found = FoundSizes(recommended("trainable", plan.effective_batch_size), evaluation)
    else:
        training = recommended("whole", plan.effective_batch_size)
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
