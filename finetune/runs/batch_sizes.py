"""The batch sizes of a run, searched for where they are ``auto``."""

from dataclasses import dataclass, replace

from finetune.batch_finder.case import Case, Part, architecture_of
from finetune.batch_finder.find import Bounds, Finder
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
    that mostly one probe is enough. It raises what ``Finder.find`` does.
    """
    config, classifier = preparation.config, preparation.classifier
    case = Case(
        preparation.device.name, architecture_of(classifier.model.config.to_dict()),
        classes=len(classifier.class_names), mode=preparation.mode,
        padded_length=plan.padded_lengths[-1], precision=config.training.precision,
    )  # fmt: skip

    def recommended(part: Part, most: int) -> int:
        bounds = bounds_of(config.search, limit=most, first=most)
        finder = Finder(preparation.device, bounds, cache_folder(config.cache, "batches"), emit)
        return finder.find(replace(case, part=part)).recommended

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
    """Return where a search ends; raise ConfigurationInvalid if its limit of memory is no size."""
    memory = options.memory_limit
    memory_bytes = None if memory is None else parse_size(memory, origin="--memory-limit")
    return Bounds(limit, first, memory_bytes, options.time_limit)
