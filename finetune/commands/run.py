"""``finetune run``: trains a classifier, several seeds or a cross-validation.

Training libraries take seconds to import, so functions import them after checking the options.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    show_paragraph,
    show_result_table,
    show_scores,
)
from finetune.commands.report import write_folds_page, write_pages
from finetune.errors import ConfigurationError, UsageError
from finetune.events import clock
from finetune.files import escape_line
from finetune.runs.folder import RunFolder, SeveralFolder
from finetune.runs.guess import guess_options
from finetune.tasks.tables import duration, format_rate

if TYPE_CHECKING:
    from finetune.config.load import LoadedConfig
    from finetune.data.dataset import LoadedData
    from finetune.runs.guess import GuessedConfig
    from finetune.runs.results import RunResults
    from finetune.runs.several import SeveralResults

Several = Annotated[int, Ge(2), Lt(2**31)]
EXAMPLES = """\b
Examples:
  finetune run reviews.csv                      train on your table
  finetune run reviews.csv --freeze-core        train only the head
  finetune run reviews.csv --folds 5            cross-validate
  finetune run offline                          use a preset, without network
  finetune run                                  train BERT-base on TREC
"""


def run(
    file: str | Path | None = None,
    *,
    config: str | Path | None = None,
    seeds: Several | None = None,
    folds: Several | None = None,
    keep_models: bool = False,
    resume_from_checkpoint: str | Path | None = None,
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
    assignments: Sequence[str] = (),
    **options: Any,
) -> "RunResults | SeveralResults":
    """Fine-tune a classifier and write its run folder, like ``finetune run``.

    Args:
        file: A table, a dataset or preset name, a YAML file, or a run to repeat.
        config: A YAML file or a preset name.
        seeds: Train with N seeds on the same splits; report means and intervals.
        folds: Cross-validate with N folds; report metrics over all rows.
        keep_models: Keep the model and the report of each fold.
        resume_from_checkpoint: Run folder to resume. auto: the run in --output-dir, the newest
            unfinished run, or a new run.
        compute_metrics: Function that returns more metrics, as for ``transformers.Trainer``.
        assignments: More options, as ``section.option=value``.
        emit: Receives the events of ``finetune.events``.
        options: Command options, with underscores: ``freeze_core=True``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    if click.get_current_context(silent=True) is None:
        clock.start()  # commands are timed from the start of their process
    options |= {"config": config, "assignments": assignments, "seeds": seeds, "folds": folds}
    options |= {"keep_models": keep_models, "resume_from_checkpoint": resume_from_checkpoint}
    loaded = read_options(file, **options)
    from finetune.runs.request import AUTO, RunRequest, resume

    read: LoadedData | None = None

    def choose() -> RunRequest:
        nonlocal read
        request = RunRequest(
            loaded.config, loaded.sources, seeds, folds, keeps_models=keep_models or not folds
        )
        if resume_from_checkpoint is None:
            request.check_folder()  # report a read-only folder before a table is read
        if resume_from_checkpoint in (None, AUTO):
            guessed = guess_options(loaded)
            request, read = replace(request, config=guessed.config), guessed.read
        return resume(request, resume_from_checkpoint) if resume_from_checkpoint else request

    with distributed.joined():
        # Other ranks must read the folders before the main process changes them.
        request = distributed.broadcast(choose)
    if not request.resumed:  # other ranks read the table themselves
        request = replace(request, read=read)
    if request.resumed and request.is_over:
        from finetune.runs.results import read_results

        return read_results(request.resumed)
    # These modules import PyTorch, which takes seconds.
    from finetune.runs.run import train
    from finetune.runs.several import train_several
    from finetune.tasks.metrics import computing

    with clock("other"), computing(compute_metrics):
        if request.variants:
            return train_several(
                request, write_pages=write_pages, write_folds_page=write_folds_page
            )
        return train(request, write_pages=write_pages)


def read_options(
    file: str | Path | None = None,
    *,
    seeds: int | None = None,
    folds: int | None = None,
    keep_models: bool = False,
    resume_from_checkpoint: str | Path | None = None,
    **options: Any,
) -> "LoadedConfig":
    """Check and return the options of a run, without reading the data or the model."""
    if seeds is not None and folds is not None:
        raise UsageError("--seeds and --folds can't be combined", remedy="drop one of them")
    if keep_models and folds is None:
        raise UsageError("--keep-models has no effect without --folds", remedy="drop it")
    processes = distributed.read_launch().world_size
    if processes > 1 and (seeds or folds) is not None:
        raise UsageError(
            f"--seeds and --folds need a single process, but a launcher started {processes}",
            remedy="drop the option, or start the command without the launcher",
        )
    chosen = file or options.get("config")
    if chosen is not None and resume_from_checkpoint not in (None, "auto"):
        raise ConfigurationError(
            "a run resumes with its own configuration", remedy=f"drop {file or '--config'}"
        )
    return flags.load(file=file, **options)


def dry_run(loaded: "GuessedConfig") -> dict[str, Any]:
    """Prepare a run up to its first step, without writing anything, and return its plan as JSON.

    Raise the same error as the run if it can't start.
    """
    from finetune.data.check import describe_lengths
    from finetune.runs.linear_head import estimate_linear_head
    from finetune.runs.plan import estimate_seconds, make_plan
    from finetune.runs.prepare import prepare
    from finetune.runs.request import RunRequest
    from finetune.runs.run import describe_facts

    folder = RunRequest(loaded.config).check_folder()
    inputs = prepare(loaded.config, sources=loaded.sources, read=loaded.read)
    plan = make_plan(inputs)
    seconds, facts = estimate_seconds(inputs, plan), asdict(describe_facts(inputs, plan))
    trained = inputs.examples["train"]
    # Nothing was timed, and the classes are listed with their rows.
    del facts["class_names"], facts["precision_reason"]
    lengths = Counter(batch.padded_length for batch in plan.batches(trained, epoch=0))
    rows = inputs.data.splits["train"]
    class_rows = inputs.task.count_classes(trained.labels)
    unlabeled = {} if inputs.data.has_labels else {"unlabeled": len(inputs.data.unlabeled or ())}
    epochs = {"num_train_epochs": plan.num_train_epochs, "steps_per_epoch": plan.steps_per_epoch}
    return {
        **facts,
        "rows": {split: len(table) for split, table in inputs.data.splits.items()} | unlabeled,
        "training_rows_by_class": class_rows,
        "tokens_of_a_training_text": describe_lengths(trained.lengths),
        "batch_size": plan.batch_size,
        "effective_batch_size": plan.examples_per_step,
        **({} if plan.method.fits_head else epochs),
        "total_steps": plan.total_steps,
        "warmup_steps": plan.warmup_steps,
        **({"learning_rate": plan.learning_rate} if plan.method.takes_steps else {}),
        "estimated_seconds": round(seconds, 1),
        "output_dir": str(folder),
        "batches_of_an_epoch_by_padded_length": dict(sorted(lengths.items())),
        "linear_head_estimate": estimate_linear_head(loaded.config, rows, inputs.data),
    }


@click.command(cls=flags.GroupedCommand, epilog=EXAMPLES)
@flags.source_options
@flags.options_of(run, "config", "assignments", "compute_metrics")
@click.option(
    "--dry-run",
    "is_dry_run",
    is_flag=True,
    help="Print the plan of the run and its estimated time, without training.",
)
@flags.config_options
@flags.with_display
def command(*, display: flags.Display, is_dry_run: bool, seeds: int | None, **options: Any) -> None:
    """Fine-tune a classifier and write a run folder.

    FILE is a table of texts, a dataset (questions, trec or hub:OWNER/NAME), a YAML file, a preset,
    or a run folder to repeat. Default: trec, a benchmark, which is downloaded.
    """
    options = flags.without_none(options)
    if is_dry_run:
        if seeds or options.keys() & {"folds", "resume_from_checkpoint"}:
            raise UsageError(
                "--dry-run can't be combined with --seeds, --folds and --resume-from-checkpoint",
                remedy="drop --dry-run or these options",
            )
        display.run(lambda: dry_run(guess_options(read_options(**options))), _show_plan)
        return
    with display.progress():
        results: Any = run(seeds=seeds, **options)
    if display.as_json:
        show_json({**results.to_json(), "output_dir": results.output_dir})
    elif seeds or "folds" in options:
        _show_several(results)
    else:
        _show_run(results)


def _show_plan(plan: dict[str, Any]) -> None:
    from finetune.tasks.labels import listed_counts

    estimate = plan.pop("linear_head_estimate")
    seconds = plan.pop("estimated_seconds")
    # Hundreds of classes don't fit on a line, and regression has no classes.
    rows = "training_rows_by_class"
    plan["non-padding tokens"] = f"{plan.pop('real_token_share'):.0%}"
    show_facts({**plan, rows: listed_counts(plan[rows]) or "no classes"})
    show_lines(f"about {duration(seconds)} ({plan['total_steps']:,} steps)")
    if estimate:
        show_lines(*estimate.lines)


def _show_run(results: "RunResults") -> None:
    from finetune.runs.results import next_commands, summarize

    facts, training, seconds = results.facts, results.training, results.stage_seconds
    if results.test.samples:
        show_scores(f"test split of {facts.data}, {results.test.samples:,} rows", results.test)
    if results.details.no_labels:
        show_result_table(results.details.no_labels.table)
    stages = ", ".join(f"{name} {time:.1f}" for name, time in seconds.items() if time >= 0.05)
    validated = []
    if results.validation:
        first = results.validation.values[0]
        validated = [f"validation {first.metric.title} {first}, {results.validation_note}"]
    rate = f", {format_rate(training.train_samples_per_second)}"
    show_lines(
        *validated,
        f"trained in {training.train_runtime:.1f} s on {facts.device}"
        f"{'' if results.details.no_labels else rate}",
        f"took {sum(seconds.values()):.1f} s: {stages}",
        f"report: {RunFolder(Path(results.output_dir)).report_file}",
    )
    show_paragraph(summarize(results))
    for number, following in enumerate(next_commands(results)):
        click.echo(escape_line(f"{'      ' if number else 'Next: '}{following}"))


def _show_several(results: "SeveralResults") -> None:
    from finetune.report.page import tabulate_runs

    first, scores = next(iter(results.runs.values())), results.scores
    folder = SeveralFolder(Path(results.output_dir), results.kind)
    title = f"test split of {first.facts.data}, {first.test.samples:,} rows"
    if scores:
        rows = f"{scores.samples:,} rows, each predicted by a model that did not see it"
        title = f"{first.facts.data}, {rows}"
    show_result_table(tabulate_runs(results), title=title)
    if not scores:
        best = "unknown without validation rows; add --validation-fraction 0.1"
        if results.best is not None:
            best = str(folder.run(results.best).path)
        show_lines(f"best run on validation: {best}", f"run folders: {folder.path}")
        return
    if scores.table:
        show_lines()
        show_result_table(scores.table)
    show_lines(
        f"predictions of all rows: {folder.predictions_file}", f"report: {folder.report_file}"
    )
    show_paragraph(results.summary)
