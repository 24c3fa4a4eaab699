"""A sweep: the options of its trials, and what these have found on the validation rows."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from finetune.config.load import SECTIONS, check_name, check_type, check_value
from finetune.config.schema import OPTIONS, Config
from finetune.config.yaml_files import read_yaml
from finetune.data import is_waiting
from finetune.errors import ConfigurationInvalid
from finetune.evaluation.statistics import Interval, bootstrap, percentile_interval
from finetune.runs.folder import SweepFolder
from finetune.runs.results import SCHEMA_VERSION
from finetune.tasks.base import Task
from finetune.tasks.metrics import METRICS
from finetune.tasks.shown import Shown

RESAMPLES = 500
# Successive halving: so many trials go on where each has had a third of the epochs of the next
# rung. Jamieson and Talwalkar, AISTATS 2016 (arXiv 1502.07943).
KEPT, RUNGS = 1 / 3, (1 / 9, 1 / 3, 1.0)
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, whole if both are; with ``log`` evenly in their logarithms."""

    low: float
    high: float
    log: bool = False


Values = Sequence[Any] | Range
Space = Mapping[str, Values]


def read_space(path: Path) -> Space:
    """Return the values of each option that a YAML file names: a list, or low and high.

    Options are in sections, as in a configuration, or alone: ``learning_rate: [1e-4, 1e-3]``.
    """
    space: dict[str, Values] = {}
    content = read_yaml(path)
    for name, value in content.items() if isinstance(content, dict) else ():
        options = value if name in SECTIONS and isinstance(value, dict) else {name: value}
        for option, values in options.items():
            check_name(option, name if name in SECTIONS else None, source=str(path))
            space[option] = _read_values(option, values, source=str(path))
    if not space:
        remedy = "write for example `learning_rate: [1e-4, 1e-3]` in a line"
        raise ConfigurationInvalid(f"{path} names no options", remedy=remedy)
    return space


def _read_values(option: str, values: Any, *, source: str) -> Values:
    """Return the values of an option of the schema; ``ConfigurationInvalid`` for others."""
    if OPTIONS[option].section not in ("model", "training") or option == "device":
        raise ConfigurationInvalid(
            f"{source}: {option} is the same for all trials of a sweep",
            remedy="give it as a flag; options of model and training may differ",
        )
    if isinstance(values, list) and values:
        return [check_value(option, value, source) for value in values]
    if isinstance(values, dict) and {"low", "high"} <= {*values} <= {"low", "high", "log"}:
        low, high = (check_value(option, values[end], source) for end in ("low", "high"))
        is_log = check_type(bool, values.get("log", False), words=source, is_strict=False)
        if isinstance(low, int | float) and (0 if is_log else -math.inf) < low < high:
            return Range(low, high, is_log)
    raise ConfigurationInvalid(
        f"{source}: {option} is {values!r}, which is neither a list nor low and high",
        remedy=f"write `{option}: [A, B]`, or `{option}: {{low: A, high: B, log: true}}`, where"
        " A is less than B and, with log, above 0",
    )


def choose_trials(space: Space, *, trials: int | None, seed: int) -> list[dict[str, Any]]:
    """Return the options of each trial: the whole grid of lists, or random ones; always the same.

    Of lists alone no combination is drawn twice.
    """
    generator = np.random.default_rng(seed)
    lists = [values for values in space.values() if not isinstance(values, Range)]
    if len(lists) == len(space):
        grid = [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]
        if trials is None or trials >= len(grid):
            return grid
        return [grid[number] for number in generator.permutation(len(grid))[:trials]]
    if trials is None:
        ranges = ", ".join(name for name, values in space.items() if isinstance(values, Range))
        raise ConfigurationInvalid(
            f"a range has no grid: {ranges}", remedy="say how many random trials: --trials 20"
        )
    return [
        {name: _draw(values, generator) for name, values in space.items()} for _ in range(trials)
    ]


def _draw(values: Values, generator: np.random.Generator) -> Any:
    """Return one of some values, of a range to three digits."""
    if not isinstance(values, Range):
        return values[int(generator.integers(len(values)))]
    low, high = values.low, values.high
    if values.log:
        drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
    else:
        drawn = generator.uniform(low, high)
    return round(drawn) if isinstance(values.low, int) else float(f"{drawn:.3g}")


@dataclass(frozen=True)
class Trial:
    """A trial: its options, and how far it has come.

    ``share`` is the part of its epochs after which it has the ``score``, higher if better; 1 if it
    has finished. The ``value`` is that of the sweep's metric, ``difference`` that to the best
    trial's, on the same rows, with its 95% interval; ``failure`` is why it could not be trained.
    """

    options: Options
    share: float = 0.0
    score: float | None = None
    value: float | None = None
    difference: Interval | None = None
    failure: str = ""

    @property
    def verdict(self) -> str:
        """How it compares with the best trial, in a few words."""
        if self.failure:
            return f"failed: {self.failure}"
        if self.share < 1:
            return f"stopped after {self.share:.0%} of its epochs" if self.share else "not begun"
        if self.difference is None:
            return ""
        is_noise = self.difference.low <= 0 <= self.difference.high
        return "may be noise" if is_noise else "worse"


@dataclass(frozen=True, repr=False)
class SweepResults(Shown):
    """The trials of a sweep by number, and the best of those that have finished, if any."""

    trials: Mapping[int, Trial]
    metric: str
    output_dir: str
    samples: int = 0
    best: int | None = None
    asked: Sequence[Options] = ()

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each trial, the best first."""
        return [
            {"trial": number, **one.options, self.metric: one.value, "verdict": one.verdict}
            for number, one in self.ranked
        ]

    @property
    def ranked(self) -> list[tuple[int, Trial]]:
        """The trials, the best first: those that have finished, then those that came far."""

        def rank(item: tuple[int, Trial]) -> tuple[bool, float, float]:
            number, one = item
            return number != self.best, -one.share, -math.inf if one.score is None else -one.score

        return sorted(self.trials.items(), key=rank)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``sweep.json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "sweep": [*self.trials],
            "best": None if self.best is None else SweepFolder.run_name(self.best),
            "metric": self.metric,
            "samples": self.samples,
            "asked": self.asked,
            "trials": {
                SweepFolder.run_name(number): {**asdict(one), "verdict": one.verdict}
                for number, one in self.trials.items()
            },
        }


def describe_request(config: Config, chosen: Sequence[Options]) -> list[dict[str, Any]]:
    """Return all that a second call may not change: the options of each trial, and the others."""
    shared = {
        name: Path(value).name if is_waiting(value) else value
        for name, option in OPTIONS.items()
        for value in [option.value_in(config)]
        if option.section in ("data", "model", "training") and not option.resumable
    }
    return [shared, *map(dict, chosen)]


def read_trials(folder: SweepFolder, asked: Sequence[Options]) -> dict[int, Trial]:
    """Return the trials of a sweep that has begun; raise if others are asked for."""

    def parse(content: dict[str, Any]) -> dict[int, Trial] | None:
        rows = [content["trials"][folder.run_name(number)] for number in content["sweep"]]
        read = TypeAdapter(Trial).validate_python
        is_same = content["asked"] == asked
        return dict(enumerate(map(read, rows), start=1)) if is_same else None

    trials = folder.read(folder.table_file, parse)
    if trials is None:
        raise ConfigurationInvalid(
            f"the sweep in {folder.path} has begun with another space or other options",
            remedy="start over with --overwrite, or choose another folder with --output-dir",
        )
    return trials


def survivors(trials: Mapping[int, Trial], numbers: Sequence[int]) -> list[int]:
    """Return the best third of some trials, two at least, in their order."""
    scored = [number for number in numbers if trials[number].score is not None]
    count = max(math.ceil(len(scored) * KEPT), 2)
    best = sorted(scored, key=lambda number: -(trials[number].score or 0.0))[:count]
    return sorted(best)


def compare_trials(folder: SweepFolder, results: SweepResults, *, task: Task) -> SweepResults:
    """Return the results with the best trial, and differences to it on the validation rows."""
    finished = {number: one for number, one in results.trials.items() if one.share == 1}
    if not finished:
        return results
    best = max(finished, key=lambda number: finished[number].score or 0.0)
    metric, rows, drawn = METRICS[results.metric], 0, {}
    for number in finished:
        run = folder.run(number)
        predictions = run.read(run.validation_file, list)
        rows = len(predictions)
        # Without probabilities, which the average precision needs.
        compute = task.weighted_metrics(predictions)
        drawn[number] = bootstrap(compute, rows=rows, resamples=RESAMPLES).get(metric.name)
    trials = dict(results.trials)
    for number, one in finished.items():
        own, base = drawn[number], drawn[best]
        if number != best and own is not None and base is not None:
            difference = (one.value or 0.0) - (finished[best].value or 0.0)
            trials[number] = replace(one, difference=percentile_interval(difference, own - base))
    return replace(results, trials=trials, best=best, samples=rows)
