"""``finetune run``: trains a classifier, several seeds or a cross-validation.

Libraries for training take seconds to import, so they are imported after the options are checked.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from annotated_types import Ge, Lt

from finetune import distributed
from finetune.commands import flags
from finetune.commands.console import (
    show_facts,
    show_json,
    show_lines,
    show_result_table,
    show_scores,
    show_table,
)
from finetune.errors import ConfigurationError, UsageError
from finetune.events import WarningMessage, clock, emit
from finetune.runs.folder import FoldsFolder, RunFolder, SeedsFolder
from finetune.runs.guess import guess_options

if TYPE_CHECKING:
    from finetune.config.load import LoadedConfig
    from finetune.runs.results import RunResults
    from finetune.runs.several import SeveralResults

Several = Annotated[int, Ge(2), Lt(2**31)]
EXAMPLES = """\b
Examples:
  finetune run reviews.csv                      a classifier of your texts
  finetune run                                  BERT-base on TREC
  finetune run offline                          a preset, needs no network
  finetune run reviews.csv --freeze-core        trains only the head
  finetune run reviews.csv --folds 5            cross-validation
"""


def run(
    file: str | Path | None = None,
    *,
    config: str | Path | None = None,
    seeds: Several | None = None,
    folds: Several | None = None,
    keep_models: bool = False,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    **options: Any,
) -> "RunResults | SeveralResults":
    """Fine-tune a classifier and write its run folder, as ``finetune run`` does.

    Args:
        file: A table, the name of a dataset or preset, a YAML file, or a run to repeat.
        config: A YAML file or the name of a preset.
        seeds: Train N seeds on the same splits; report mean and intervals.
        folds: Cross-validate with N folds; report metrics of all rows.
        keep_models: Keep the model and the report of each fold.
        resume_from_checkpoint: Resume the run in this folder, or train a finished run for more
            epochs. auto: the run in --output-dir, the newest unfinished one, or a new run.
        assignments: More options, as ``section.option=value``.
        emit: Is called with the events of ``finetune.events``.
        options: The flags of the command, with underscores: ``freeze_core=True``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    if click.get_current_context(silent=True) is None:
        clock.start()  # a command starts its clock with the process
    loaded = read_options(
        file,
        config=config,
        seeds=seeds,
        folds=folds,
        keep_models=keep_models,
        resume_from_checkpoint=resume_from_checkpoint,
        assignments=assignments,
        **options,
    )
    from finetune.commands.resuming import AUTO, Work, choose_work

    given = Work(loaded.config, loaded.sources, seeds, folds, keep_models or not folds)

    def choose() -> Work:
        asked = given
        if resume_from_checkpoint is None:
            # A folder that can't be written to is reported before a table is read.
            asked.find_free_folder()
        if resume_from_checkpoint in (None, AUTO):
            asked = replace(asked, config=guess_options(loaded).config)
        return choose_work(asked, resume_from_checkpoint)

    with distributed.joined():
        # The choice depends on folders, which the main process is about to change.
        work = distributed.broadcast(choose)
    if work.results:
        return work.results
    # These take seconds to import PyTorch.
    from finetune.commands.training import train, train_several

    with clock("other"):
        return (train_several if work.seeds or work.folds else train)(work)


def read_options(
    file: str | Path | None = None,
    *,
    config: str | Path | None = None,
    seeds: int | None = None,
    folds: int | None = None,
    keep_models: bool = False,
    resume_from_checkpoint: str | Path | None = None,
    **options: Any,
) -> "LoadedConfig":
    """Return all options of a run, checked without reading data and model."""
    several = {name: one for name, one in (("seeds", seeds), ("folds", folds)) if one is not None}
    if len(several) > 1:
        raise UsageError("--seeds and --folds can't be combined", remedy="drop one of them")
    if keep_models and folds is None:
        raise UsageError(
            "--keep-models has no effect without --folds",
            remedy="drop it: a single run keeps its model",
        )
    for name in several:
        if (processes := distributed.read_launch().world_size) > 1:
            raise UsageError(
                f"--{name} needs one process, but a launcher started {processes}",
                remedy=f"drop --{name}, or start it without the launcher",
            )
    if (file or config) is not None and resume_from_checkpoint not in (None, "auto"):
        raise ConfigurationError(
            "a run resumes with its own configuration", remedy=f"drop {file or '--config'}"
        )
    return flags.load(file=file, config=config, **options)


def dry_run(loaded: "LoadedConfig") -> dict[str, Any]:
    """Prepare a run up to its first step, and return what it would do as JSON.

    It writes nothing, and raises whatever would keep the run from starting.
    """
    from finetune.commands.resuming import Work
    from finetune.data.check import check_splits, describe_lengths, suggest_changes
    from finetune.runs.duration import estimate_seconds
    from finetune.runs.expectation import expect
    from finetune.runs.plan import make_plan
    from finetune.runs.prepare import prepare
    from finetune.runs.run import describe_facts

    folder = Work(loaded.config).find_free_folder()
    inputs = prepare(loaded.config, sources=loaded.sources)
    plan = make_plan(inputs)
    seconds, facts = estimate_seconds(inputs, plan), asdict(describe_facts(inputs, plan))
    trained = inputs.examples["train"]
    # Nothing has been timed.
    del facts["class_names"], facts["precision_reason"]
    lengths = Counter(batch.padded_length for batch in plan.batches(trained, epoch=0))
    rows = inputs.data.splits["train"]
    findings = check_splits(inputs.data.splits, inputs.task)
    for one in suggest_changes(findings, lengths=None):
        emit(WarningMessage(one.finding))
    class_rows = inputs.task.count_classes(trained.labels)
    return {
        **facts,
        "rows": dict(inputs.data.splits.num_rows),
        "training_rows_by_class": class_rows,
        "tokens_of_a_training_text": describe_lengths(trained.lengths),
        "batch_size": plan.batch_size,
        "effective_batch_size": plan.effective_batch_size,
        "num_train_epochs": plan.num_train_epochs,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "warmup_steps": plan.warmup_steps,
        "learning_rate": plan.peak,
        "estimated_seconds": round(seconds, 1),
        "output_dir": str(folder),
        "batches_of_an_epoch_by_padded_length": dict(sorted(lengths.items())),
        "expectation": expect(loaded.config, rows, inputs.data.task),
    }


@click.command(cls=flags.GroupedCommand, epilog=EXAMPLES)
@flags.source_options
@flags.options_of(run, "config", "assignments")
@click.option(
    "--dry-run",
    "is_dry_run",
    is_flag=True,
    help="Print what the run would do and how long it takes, and stop.",
)
@flags.config_options
@flags.with_display
def command(*, display: flags.Display, is_dry_run: bool, seeds: int | None, **options: Any) -> None:
    """Fine-tune a classifier and write a run folder.

    FILE is a table of texts, whose columns, model and length are guessed; questions (bundled),
    trec or hub:OWNER/NAME; a YAML file or preset; or a run to repeat. Default: trec, a benchmark,
    which is downloaded.
    """
    options = flags.given(options)
    if is_dry_run:
        if seeds or options.keys() & {"folds", "resume_from_checkpoint"}:
            raise UsageError(
                "--dry-run can't be combined with --seeds, --folds and --resume-from-checkpoint",
                remedy="drop --dry-run or these options",
            )
        with display.progress():
            loaded = guess_options(read_options(**options))
            plan = dry_run(loaded)
        _show_plan(plan, as_json=display.as_json)
        return
    with display.progress():
        results: Any = run(seeds=seeds, **options)
    if display.as_json:
        show_json({**results.to_json(), "output_dir": results.output_dir})
    elif seeds:
        _show_seeds(results)
    elif "folds" in options:
        _show_folds(results)
    else:
        _show_run(results)


def _show_plan(plan: dict[str, Any], *, as_json: bool) -> None:
    from finetune.tasks.labels import listed_counts
    from finetune.tasks.tables import duration

    expected = plan.pop("expectation")
    if as_json:
        show_json({**plan, "expectation": expected and asdict(expected)})
        return
    seconds = plan.pop("estimated_seconds")
    # Hundreds of classes don't fit a line, and regression has no classes.
    rows = "training_rows_by_class"
    show_facts({**plan, rows: listed_counts(plan[rows]) or "no classes"})
    show_lines(f"about {duration(seconds)} ({plan['total_steps']:,} steps)")
    if expected:
        show_lines(*expected.lines)


def _show_run(results: "RunResults") -> None:
    from finetune.runs.summary import next_command, summarize
    from finetune.tasks.tables import format_rate

    facts, training = results.facts, results.training
    rate = format_rate(training.train_samples_per_second)
    show_scores(f"test split of {facts.data}, {results.test.samples:,} rows", results.test)
    seconds = results.stage_seconds
    stages = ", ".join(f"{name} {one:.1f}" for name, one in seconds.items() if one >= 0.05)
    validated = []
    if results.validation:
        first = results.validation.values[0]
        validated = [f"validation {first.metric.title} {first}, {results.validation_note}"]
    show_lines(
        *validated,
        f"trained in {training.train_runtime:.1f} s on {facts.device}, {rate}",
        f"took {sum(seconds.values()):.1f} s: {stages}",
        f"report: {RunFolder(Path(results.output_dir)).report_file}",
    )
    show_lines(*click.wrap_text(summarize(results)).splitlines(), f"Next: {next_command(results)}")


def _show_seeds(results: "SeveralResults") -> None:
    from finetune.tasks.scores import MetricValue
    from finetune.tasks.tables import format_interval

    first = next(iter(results.runs.values()))
    metrics, samples = [value.metric for value in first.test.values], first.test.samples
    folder = SeedsFolder(Path(results.output_dir))
    rows = [[folder.run_name(n), *map(str, one.test.values)] for n, one in results.runs.items()]
    mean, over_rows = ["mean"], [f"95% over {samples:,} rows"]
    over_seeds = [f"95% over {len(results.runs)} seeds"]
    for metric in metrics:
        own = results.test[metric.name]
        low, high = own.low, own.high
        if metric.is_fraction:  # an interval of few seeds may exceed 0% or 100%
            low, high = max(low, 0.0), min(high, 1.0)
        mean.append(str(MetricValue(metric, own.value)))
        over_seeds.append(f"{MetricValue(metric, low)} to {MetricValue(metric, high)}")
        over_rows.append(format_interval(own.value, samples) if metric.is_proportion else "–")
    rows += [mean, over_seeds, over_rows]
    columns = ("run", *(metric.title for metric in metrics))
    show_lines(f"test split of {first.facts.data}, {samples:,} rows", "")
    show_table(columns, rows, numbers=columns[1:])
    best = "not known without held-out rows; --validation-fraction 0.1 holds some out"
    if results.best is not None:
        best = str(folder.run(results.best).path)
    show_lines(f"best on validation: {best}", f"run folders: {results.output_dir}")


def _show_folds(results: "SeveralResults") -> None:
    from finetune.report.page import tabulate_folds

    first, folder = results.runs[1], FoldsFolder(Path(results.output_dir))
    assert results.scores
    show_lines(
        f"{first.facts.data}, {results.scores.samples:,} rows, each predicted without it", ""
    )
    show_result_table(tabulate_folds(results))
    if table := results.scores.table:
        show_lines()
        show_result_table(table)
    show_lines(
        f"predictions of all rows: {folder.predictions_file}",
        f"report: {folder.report_file}",
        "",
        results.scores.describe("rows, each by a model that did not see it"),
    )
