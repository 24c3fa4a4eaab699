"""``finetune sweep``: a search for better options."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_result_table
from finetune.config.schema import PositiveInt, change_options
from finetune.events import clock
from finetune.runs.guess import guess_options

if TYPE_CHECKING:
    from finetune.runs.several import SeveralResults

# Held out for validation if --validation-fraction is not set.
VALIDATION_FRACTION = 0.2
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
    """Train a trial for each choice of some options, as ``finetune sweep`` does.

    Args:
        space: A YAML file with the values of options: lists, or ``low``, ``high`` and ``log``.
        trials: Number of trials, drawn at random. Default: the whole grid.
        config: A YAML file or the name of a preset.
        assignments: More options, as ``section.option=value``.
        emit: Is called with the events of ``finetune.events``.
        options: The flags of ``finetune.run``, with underscores, for all trials.
    """
    loaded = guess_options(flags.load(config=config, assignments=assignments, **options))
    from finetune.commands.resuming import Work, find_begun
    from finetune.config.load import check_contradictions
    from finetune.runs.several import choose_trials, read_space

    if loaded.config.data.validation_fraction is None:
        held_out = {"validation_fraction": VALIDATION_FRACTION}
        loaded = replace(loaded, config=change_options(loaded.config, held_out))
    space_of_trials = read_space(Path(space).expanduser())
    chosen = choose_trials(space_of_trials, trials=trials, seed=loaded.config.training.seed)
    for options_of_trial in chosen:
        check_contradictions(change_options(loaded.config, options_of_trial))
    work = Work(loaded.config, loaded.sources, trials=chosen)
    if not loaded.config.output.overwrite and (begun := find_begun(work)):
        work = replace(work, resumed=begun)
    # This takes seconds to import PyTorch.
    from finetune.commands.training import train_several

    with clock("other"):
        return train_several(work)


@click.command(cls=flags.GroupedCommand, epilog=EXAMPLES)
@click.argument("space", type=flags.PATH)
@flags.config_option
@flags.options_of(sweep, "config", "assignments")
@flags.assignments_option
@flags.config_options
@flags.with_display
def command(*, space: Path, display: flags.Display, **options: Any) -> None:
    """Search for better options: train one trial per choice of the options in SPACE, a YAML file.

    Trials share data and features, and are compared on validation rows. The command
    reports the best trial. The same command continues a sweep that was stopped.
    """
    display.run(partial(sweep, space), _show, **flags.given(options))


def _show(results: "SeveralResults") -> None:
    from finetune.runs.folder import SweepFolder
    from finetune.tasks.metrics import METRICS
    from finetune.tasks.scores import MetricValue
    from finetune.tasks.tables import Table, format_value

    metric, names = METRICS[str(results.metric)], [*results.options[results.numbers[0]]]
    rows = [
        (
            f"trial-{number}",
            *(format_value(results.options[number][name]) for name in names),
            str(MetricValue(metric, value))
            if (value := results.value(number)) is not None
            else f"failed: {results.failures[number]}",
        )
        for number in results.ranked
    ]
    assert results.best
    validation = results.runs[results.best].validation
    assert validation
    columns = ("trial", *(name.replace("_", " ") for name in names), metric.title)
    show_lines(f"{validation.samples:,} validation rows", "")
    show_result_table(Table("Trials", columns, rows, text_columns=len(columns)))
    note = "The best of many trials looks better here than it is. Test it on other rows."
    show_lines(*click.wrap_text(note).splitlines())
    file = SweepFolder(Path(results.output_dir)).best_file
    show_lines(f"train and test the best options: finetune run {file}")
