"""``finetune sweep``: searches for better options."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_result_table
from finetune.commands.report import write_folds_page, write_pages
from finetune.config.load import (
    SECTIONS,
    check_contradictions,
    check_name,
    check_type,
    check_value,
    read_yaml,
)
from finetune.config.schema import OPTIONS, PositiveInt, change_options
from finetune.errors import ConfigurationError
from finetune.events import clock
from finetune.runs.guess import guess_options
from finetune.tasks.tables import Table, format_value

if TYPE_CHECKING:
    from finetune.runs.several import SeveralResults

# By option: a list, or a range with ``low``, ``high`` and ``log``.
Space = Mapping[str, list[Any] | dict[str, Any]]
# Held out for validation if --validation-fraction is not set.
VALIDATION_FRACTION = 0.2
NOTE = "The best score of many trials is too optimistic. Test the best options on other rows."
EXAMPLES = """\b
Examples:
  finetune sweep space.yaml --data reviews.csv
  finetune sweep space.yaml --data reviews.csv --freeze-core --trials 20
SPACE is for example:
  learning_rate: {low: 1e-5, high: 1e-3, log: true}
  train_layers: [1, 2, 4]
"""


def sweep(
    space: str | Path,
    *,
    trials: PositiveInt | None = None,
    config: str | Path | None = None,
    assignments: Sequence[str] = (),
    **options: Any,
) -> "SeveralResults":
    """Train one trial per combination of option values, like ``finetune sweep``.

    Args:
        space: A YAML file with option values: lists, or ``low``, ``high`` and ``log``.
        trials: Number of trials, drawn at random. Default: the whole grid.
        config: A YAML file or a preset name.
        assignments: More options, as ``section.option=value``.
        emit: Receives the events of ``finetune.events``.
        options: The options of ``finetune.run``, for all trials.
    """
    loaded = guess_options(flags.load(config=config, assignments=assignments, **options))
    from finetune.runs.request import RunRequest, find_started

    if loaded.config.data.validation_fraction is None:
        held_out = {"validation_fraction": VALIDATION_FRACTION}
        loaded = replace(loaded, config=change_options(loaded.config, held_out))
    space_of_trials = read_space(Path(space).expanduser())
    chosen = choose_trials(space_of_trials, trials=trials, seed=loaded.config.training.seed)
    for options_of_trial in chosen:
        check_contradictions(change_options(loaded.config, options_of_trial))
    request = RunRequest(
        loaded.config, loaded.sources, trials=chosen, keeps_models=False, read=loaded.read
    )
    if not loaded.config.output.overwrite:
        request = replace(request, resumed=find_started(request))
    # This takes seconds to import PyTorch.
    from finetune.runs.several import train_several

    with clock("other"):
        return train_several(request, write_pages=write_pages, write_folds_page=write_folds_page)


def read_space(path: Path) -> Space:
    """Read the values of each option from a YAML file, with or without sections."""
    space: dict[str, list[Any] | dict[str, Any]] = {}
    content = read_yaml(path)
    for name, value in content.items() if isinstance(content, dict) else ():
        options = value if name in SECTIONS and isinstance(value, dict) else {name: value}
        for option, values in options.items():
            check_name(option, name if name in SECTIONS else None, source=str(path))
            space[option] = _read_values(option, values, source=str(path))
    if not space:
        remedy = "add a line such as `learning_rate: [1e-4, 1e-3]`"
        raise ConfigurationError(f"{path} has no options", remedy=remedy)
    return space


def _read_values(option: str, values: Any, *, source: str) -> list[Any] | dict[str, Any]:
    """Convert the values of an option, or raise ``ConfigurationError`` if they are invalid."""
    has_same_result = OPTIONS[option].resumable and option != "batch_size"
    if OPTIONS[option].section not in ("model", "training") or has_same_result:
        raise ConfigurationError(
            f"{source}: {option} can't vary in a sweep",
            remedy="set it as a flag; only model and training options that change the result "
            "can vary",
        )
    if isinstance(values, list) and values:
        return [check_value(option, value, source) for value in values]
    if isinstance(values, dict) and {"low", "high"} <= {*values} <= {"low", "high", "log"}:
        low, high = (check_value(option, values[end], source) for end in ("low", "high"))
        is_log = check_type(bool, values.get("log", False), words=source, is_strict=False)
        if isinstance(low, int | float) and (0 if is_log else -math.inf) < low < high:
            return {"low": low, "high": high, "log": is_log}
    raise ConfigurationError(
        f"{source}: {option} is {values!r}, which is neither a list nor low and high",
        remedy=f"write `{option}: [A, B]`, or `{option}: {{low: A, high: B, log: true}}`, where"
        " A is less than B and, with log, above 0",
    )


def choose_trials(space: Space, *, trials: int | None, seed: int) -> list[dict[str, Any]]:
    """Return the options of each trial: a grid, or random values with a fixed seed."""
    generator = random.Random(seed)
    ranges = [name for name, values in space.items() if isinstance(values, dict)]
    if not ranges:
        grid = [dict(zip(space, row, strict=True)) for row in itertools.product(*space.values())]
        return grid if trials is None or trials >= len(grid) else generator.sample(grid, trials)
    if trials is None:
        raise ConfigurationError(
            f"a grid needs lists, but these options are ranges: {', '.join(ranges)}",
            remedy="set the number of random trials: --trials 20",
        )
    return [
        {name: _draw(values, generator) for name, values in space.items()} for _ in range(trials)
    ]


def _draw(values: list[Any] | dict[str, Any], generator: random.Random) -> Any:
    """Draw one of the values, or a number from the range with three significant digits."""
    if isinstance(values, list):
        return generator.choice(values)
    low, high = values["low"], values["high"]
    if values["log"]:
        drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
    else:
        drawn = generator.uniform(low, high)
    rounded = round(drawn) if isinstance(low, int) else float(f"{drawn:.3g}")
    return min(max(rounded, low), high)


@click.command(cls=flags.GroupedCommand, epilog=EXAMPLES)
@click.argument("space", type=flags.PATH)
@flags.config_option
@flags.options_of(sweep, "config", "assignments")
@flags.assignments_option
@flags.config_options
@flags.with_display
def command(*, space: Path, display: flags.Display, **options: Any) -> None:
    """Search for better options: train trials with the option values in SPACE, a YAML file.

    Trials share data and features, and are compared on validation rows. The command reports the
    best trial. Run the same command again to continue an interrupted sweep.
    """
    display.run(partial(sweep, space), _show, **options)


def _show(results: "SeveralResults") -> None:
    from finetune.runs.folder import SeveralFolder
    from finetune.tasks.metrics import METRICS
    from finetune.tasks.scores import MetricValue

    metric, names = METRICS[str(results.metric)], [*results.options[results.numbers[0]]]
    rows = []
    for number in results.ranked:
        value = results.value(number)
        score = f"failed: {results.failures.get(number)}"
        if value is not None:
            score = str(MetricValue(metric, value))
        options = (format_value(results.options[number][name]) for name in names)
        rows.append((f"trial-{number}", *options, score))
    validation = results.best and results.runs[results.best].validation
    columns = ("trial", *(name.replace("_", " ") for name in names), metric.title)
    table = Table("Trials", columns, rows, text_columns=len(columns), note=NOTE)
    title = f"{validation.samples:,} validation rows" if validation else table.title
    show_result_table(table, title=title)
    file = SeveralFolder(Path(results.output_dir), "sweep").best_file
    show_lines(f"train and test the best options: finetune run {file}")
