"""The space of a sweep, and the options of its trials: the whole grid, or random values."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.load import SECTIONS, check_name, check_type, check_value
from finetune.config.schema import OPTIONS, Config
from finetune.config.yaml_files import read_yaml
from finetune.data import is_waiting
from finetune.errors import ConfigurationError
from finetune.runs.folder import SweepFolder


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
        raise ConfigurationError(f"{path} names no options", remedy=remedy)
    return space


def _read_values(option: str, values: Any, *, source: str) -> Values:
    """Return the values of an option of the schema; ``ConfigurationError`` for others."""
    if OPTIONS[option].section not in ("model", "training") or option == "device":
        raise ConfigurationError(
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
    raise ConfigurationError(
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
        raise ConfigurationError(
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


def describe_request(config: Config, chosen: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return all that a second call may not change: the options of each trial, and the others."""
    shared = {
        name: Path(value).name if is_waiting(value) else value
        for name, option in OPTIONS.items()
        for value in [option.value_in(config)]
        if option.section in ("data", "model", "training") and not option.resumable
    }
    return [shared, *map(dict, chosen)]


def read_failures(folder: SweepFolder, request: list[dict[str, Any]]) -> dict[int, str]:
    """Return which trials of a sweep that has begun have failed; raise if others are wanted."""

    def parse(content: dict[str, Any]) -> dict[int, str] | None:
        trials = enumerate(content["trials"].values(), start=1)
        failures = {number: trial["failure"] for number, trial in trials if trial["failure"]}
        return failures if content["request"] == request else None

    failures = folder.read(folder.table_file, parse)
    if failures is None:
        raise ConfigurationError(
            f"the sweep in {folder.path} has begun with another space or other options",
            remedy="start over with --overwrite, or choose another folder with --output-dir",
        )
    return failures
