"""Trains a text classifier, from its options to its results.

After ``prepare`` of prepare.py, ``Run.begin`` makes the plan and restores a checkpoint if it
resumes, ``Run.train`` takes the steps, ``Run.finish`` saves and evaluates the best model.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import distributed
from finetune.config.load import dump_config
from finetune.data.dataset import mark_near_duplicates
from finetune.devices.base import move_to_device
from finetune.devices.host import kept_awake
from finetune.errors import (
    BatchDoesNotFitError,
    InterruptionError,
    LossNotFiniteError,
    explain,
    system_error,
)
from finetune.evaluation.statistics import Calibration, measure_calibration
from finetune.events import Info, clock, emit, muted, sent_to, stage
from finetune.files import replacing, write_json, write_jsonl, write_text_atomically
from finetune.model.load import TextModel, load_pretrained, save_model
from finetune.model.lora import ADAPTER_CONFIG, Adapter
from finetune.model.structure import count_parameters
from finetune.runs.checkpoint import Checkpoints, nothing_to_resume
from finetune.runs.features import stored_features
from finetune.runs.folder import RunFolder, SeveralFolder
from finetune.runs.journal import Journal, Tracker, continue_journal, tracked
from finetune.runs.linear_head import LinearHeadFitter, PrototypeFitter
from finetune.runs.manifest import (
    Manifest,
    read_threads,
    restore_threads,
    write_confidences,
    write_environment,
    write_inference,
)
from finetune.runs.plan import make_batch_sizes, make_plan
from finetune.runs.prepare import RunInputs, keep_tables, prepare
from finetune.runs.request import RunRequest
from finetune.runs.results import (
    ClassWords,
    RunDetails,
    RunFacts,
    RunResults,
    TrainingMetrics,
    UnlabeledTexts,
    ValidationKind,
    describe_texts,
    with_intervals,
)
from finetune.runs.trained import TrainedModel
from finetune.runs.words import explain_rows, words_of_classes
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.explanation import Explanation
from finetune.tasks.metrics import choose_metric
from finetune.tasks.scores import Scores
from finetune.training.interruption import signal_of
from finetune.training.loop import Progress, TrainingLoop
from finetune.training.plan import Plan

Predicted = tuple[NDArray[np.float32], Labels]
MAX_EXAMPLES = 3
WritePages = Callable[[RunFolder, RunResults], object]


@distributed.joined()
def train(request: RunRequest, *, write_pages: WritePages) -> RunResults:
    """Train a new or interrupted run to its end.

    The folder of a new run is created first, and deleted if the run fails before training. With
    several ranks, each calls this. A run can resume with a different number of ranks.
    """
    journal = Journal()
    lock = request.lock() if distributed.is_main() else nullcontext(RunFolder(Path()))
    with kept_awake(), lock as locked, interruption_explained(locked), sent_to(journal):
        folder = distributed.broadcast(lambda: locked)
        inputs = prepare(request.config, sources=request.sources, read=request.read)
        inputs = keep_tables(inputs, folder)
        with Run.begin(inputs, folder, resumes=bool(request.resumed), journal=journal) as run:
            run.train()
            results = run.finish(write_pages=write_pages)
        if request.config.data.private_data:
            folder.delete_tables()
        return results


class _Tested(NamedTuple):
    """Test predictions with their rows, scores and words. Empty without a test split."""

    predicted: Predicted | None = None
    rows: Sequence[dict[str, object]] = ()
    scores: Scores = Scores(0, {})
    class_words: Mapping[str, ClassWords] = {}

    def calibration(self, task: Task) -> Calibration | None:
        """Measure the calibration of a model that was calibrated on validation rows."""
        return self.predicted and measure_calibration(task, *self.predicted)


class Run:
    """A training run, ready for its next step.

    The trainer has token IDs and the whole model, or features and the trainable layers. ``journal``
    writes events to the folder; ``tracker`` reports some of them.
    """

    tracker: Tracker

    @classmethod
    @contextmanager
    def begin(
        cls,
        inputs: RunInputs,
        folder: RunFolder,
        *,
        resumes: bool,
        measured: Plan | None = None,
        journal: Journal,
    ) -> Iterator["Run"]:
        """Yield a run in a folder locked by the main process, and add remedies to its errors."""
        with failures_explained(folder, inputs), sent_to(journal):
            if resumes:
                distributed.broadcast(lambda: _check_resumable(inputs, folder))
                restore_threads(distributed.broadcast(lambda: read_threads(folder)))
            plan = make_plan(inputs, measured)
            run = cls(inputs, plan, folder, journal)
            if resumes:
                run.checkpoints.restore(run.trainer)
                emit(Info(f"resuming after step {run.progress.steps:,}"))
                if run.head:
                    run.head.report_unlabeled()
            if distributed.is_main():
                if resumes:
                    folder.digests_file.unlink(missing_ok=True)  # the files change from now on
                    continue_journal(folder, steps=run.progress.steps)
                else:
                    folder.start()
                    replace(Manifest.of(inputs), options=run.config).write(folder)
                    write_text_atomically(folder.config_file, dump_config(run.config))
                    write_environment(folder, inputs, plan)
                    folder.write_digests()
                journal.open(folder)
            with tracked(inputs.config, folder) as tracker, sent_to(tracker):
                run.tracker = tracker
                try:
                    yield run
                except BaseException:
                    # The other processes may be waiting in a different collective.
                    if run.trainer.has_trained and distributed.world_size() == 1:
                        run.checkpoints.save(run.trainer)
                    raise

    def __init__(self, inputs: RunInputs, plan: Plan, folder: RunFolder, journal: Journal) -> None:
        self.inputs, self.plan, self.folder, self.journal = inputs, plan, folder, journal
        self.config, device = plan.config, inputs.device
        batch_size, eval_batch_size = make_batch_sizes(inputs, plan)
        device.choose_attention(longest_tokens=plan.padded_lengths[-1])
        # The pass through the frozen layers counts as training time.
        started = time.perf_counter()
        with stage("features"):
            model, examples = stored_features(inputs, plan, eval_batch_size)
        self.trainer = trainer = TrainingLoop(
            model,
            plan,
            task=inputs.task,
            device=device,
            head=inputs.text_model.structure.head,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            frozen_in_bf16=inputs.mode.is_lora,
        )
        trainer.examples = examples
        keep = inputs.config.output.save_total_limit
        self.checkpoints = trainer.checkpoints = Checkpoints(
            folder, keep=keep, device=device, journal=journal
        )
        if not distributed.is_main():
            # With the same dropout on every rank, gradients would be noisier.
            torch.manual_seed(plan.seed + distributed.rank())
        self.head: LinearHeadFitter | None = None
        if plan.method.uses_prototypes:
            trainer.fitter = PrototypeFitter(inputs, trainer)
        elif plan.method.fits_head:
            with stage("cross-validate"):
                self.head = trainer.fitter = LinearHeadFitter(inputs, trainer)
        self._seconds_before_steps = time.perf_counter() - started

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        return self.trainer.progress

    def train(self) -> None:
        """Take the remaining steps. A signal raises ``Stopped``."""
        self.progress.seconds += self._seconds_before_steps
        self._seconds_before_steps = 0.0
        self.trainer.train()

    def _merge_adapter(self) -> tuple[TextModel, Adapter]:
        """Merge the adapter into the pretrained model, which makes all further predictions.

        This way, the evaluated model is exactly the saved model, whatever the frozen layers'
        precision.
        """
        trained, config = self.inputs.text_model, self.config
        adapter = Adapter.of(trained.model, trained.structure)
        with muted():
            merged = load_pretrained(
                config.model, trained.task, seed=self.plan.seed, pooling=trained.pooling
            )
        adapter.merge_into(merged.model)
        move_to_device(merged.model, self.inputs.device.torch_device)
        self.trainer.predictor = replace(self.trainer.predictor, model=merged.model)
        # The merged model reads token IDs.
        self.trainer.examples = self.inputs.examples
        return merged, adapter

    def finish(self, *, write_pages: WritePages | None) -> RunResults:
        """Save the best model, evaluate it on validation and test rows, and write the results.

        A run is finished only after its pages are written. Without pages, as in a fold, only the
        configuration of the model is saved.
        """
        folder, is_main = self.folder, distributed.is_main()
        peak_bytes = self.inputs.device.memory.peak_bytes()
        self.checkpoints.load_best(self.trainer)
        saved, adapter = self.inputs.text_model, None
        if self.config.model.lora:
            saved, adapter = self._merge_adapter()
        task, validation = self._calibrate(saved)
        # Keep the task in the inputs, because the next seed starts from it.
        inputs = replace(self.inputs, text_model=replace(self.inputs.text_model, task=task))
        if is_main:
            with stage("saving"):
                saved = replace(saved, task=task)
                self._save(saved, adapter, validation, is_whole=write_pages is not None)
        scores, kind = self._score_validation(task, validation)
        may_explain = is_main and write_pages is not None and not self.config.data.private_data
        tested = self._test(inputs, saved, explains=may_explain)
        details = _describe_details(inputs, self.plan, self.head, self.progress)
        details = replace(details, class_words=tested.class_words)
        if inputs.method.uses_prototypes:
            details = replace(details, no_labels=self._describe_texts(task))
        results = RunResults(
            task=task,
            facts=describe_facts(inputs, self.plan),
            training=self._training_metrics(peak_bytes),
            details=details,
            validation=scores,
            test=tested.scores,
            calibration=tested.calibration(task) if validation else None,
            validation_kind=kind,
            output_dir=str(folder.path),
        )
        if is_main:
            write_jsonl(folder.predictions_file, tested.rows)
            if write_pages:
                with stage("report"):
                    write_pages(folder, replace(results, stage_seconds=clock.seconds()))
            # Last, because a run with results and no checkpoints is finished.
            results = replace(results, stage_seconds=clock.take())
            write_json(folder.results_file, results.to_json())
            self.journal.open(None)
            folder.write_digests()
            self.trainer.has_trained = False  # there is nothing left to resume
            folder.delete_checkpoints()
        self.tracker.report(
            "test", results.test.metrics, step=self.progress.steps, epoch=results.training.epoch
        )
        return results

    def _score_validation(
        self, task: Task, validation: Predicted | None
    ) -> tuple[Scores | None, ValidationKind | None]:
        """Score held-out or cross-validated rows, if any."""
        if validation:
            return task.score(*validation), "held out"
        if not self.head or self.head.cross_validated is None or self.inputs.data.drawn is not None:
            return None, None
        labels = self.inputs.examples["train"].labels
        return self.inputs.task.score(self.head.cross_validated, labels), "cross-validated"

    def _test(self, inputs: RunInputs, saved: TextModel, *, explains: bool) -> "_Tested":
        """Predict and score the test split, if any, and explain some of its rows."""
        if "test" not in inputs.examples:
            return _Tested()
        task = inputs.task
        with stage("test"):
            test = self.trainer.predict("test")
        rows = _prediction_rows(inputs, "test", test)
        scores, class_words = with_intervals(task.score(*test), task, rows), {}
        if explains:
            with stage("words"):
                explained, sample = self._explain(saved, task, *test)
            for number, explanation in explained.items():
                rows[number]["explanation"] = [change.to_json() for change in explanation]
            class_words = words_of_classes(task, test[0], explained, sample)
        return _Tested(test, rows, scores, class_words)

    def _describe_texts(self, task: Task) -> UnlabeledTexts:
        """Summarize the predictions for unlabeled texts of a run without labels."""
        with stage("unlabeled"):
            logits, _ = self.trainer.predict("unlabeled")
        texts, misfits = self.inputs.data.unlabeled, self.progress.misfits
        return describe_texts(task, logits, texts, misfits=misfits)

    def _explain(
        self, saved: TextModel, task: Task, logits: Logits, labels: Labels
    ) -> tuple[dict[int, Explanation], list[int]]:
        """Return explanations of mistakes and of a sample of test rows, and this sample."""
        # Use only shapes of the run.
        model = TrainedModel(
            self.config,
            task,
            "text_pair" in self.inputs.data.splits["test"].column_names,
            saved,
            self.inputs.device,
            replace(self.trainer.predictor, model=saved.model),
            padded_lengths=self.plan.padded_lengths,
        )
        errors = task.row_errors(task.prediction_rows(logits, labels))
        worst = np.argsort(-errors, kind="stable")[: np.count_nonzero(errors)].tolist()
        examples, rows = self.inputs.examples, self.inputs.data.splits["test"]
        tokens = float(sum(split.lengths.sum() for split in examples.values()))
        if self.plan.method.takes_steps:
            # A backward pass takes about twice as long as a forward pass.
            trained = self.progress.steps * self.plan.examples_per_step
            tokens += 3 * trained * float(examples["train"].lengths.mean())
        return explain_rows(task, model.text_logits, rows, logits, mistakes=worst, tokens=tokens)

    def _save(
        self,
        saved: TextModel,
        adapter: Adapter | None,
        validation: Predicted | None,
        *,
        is_whole: bool,
    ) -> None:
        """Save the model and what predictions need, or its configuration if not ``is_whole``."""
        folder, options = self.folder, self.config.model
        last = folder.model_config_file.name
        if not is_whole:
            saved.task.configure(saved.model.config)
            with replacing(folder.model_folder, last=last) as path:
                saved.model.config.save_pretrained(path)
            return
        if adapter and not saved.structure.mean_layer:
            with replacing(folder.adapter_folder, last=ADAPTER_CONFIG) as path:
                save_model(saved, path, max_length=options.max_length, with_weights=False)
                # The output layer may have been scaled after the adapter was merged.
                base, revision = saved.source.published
                head = saved.structure.head
                adapter.write(path, saved.model, head, base=base, revision=revision)
        with replacing(folder.model_folder, last=last) as path:
            save_model(saved, path, max_length=options.max_length)
        write_inference(
            folder, self.config, max_tokens=saved.max_tokens,
            reads_pairs="text_pair" in self.inputs.data.splits["train"].column_names,
        )  # fmt: skip
        if validation:
            write_confidences(folder, saved.task, *validation)

    @clock("validation")
    def _calibrate(self, text_model: TextModel) -> tuple[Task, Predicted | None]:
        """Calibrate the task on validation rows, and scale the output layer accordingly.

        Also return logits and labels of these rows for the scaled model, or None without rows.
        """
        task, parameters = text_model.task, text_model.output_parameters
        if "validation" not in self.trainer.examples:
            return task.scale_output_layer(parameters), None
        predict = partial(self.trainer.predict, "validation")
        fits_temperature = self.config.training.calibrate
        task = task.calibrate(cache(predict), fits_temperature=fits_temperature)
        if task.temperature != 1:
            temperature = f"a temperature of {task.temperature:.3g}, fitted on validation rows"
            emit(Info(f"calibration: the logits are divided by {temperature}"))
        task = task.scale_output_layer(parameters)
        return task, predict()

    def _training_metrics(self, peak_bytes: int | None) -> TrainingMetrics:
        progress, plan = self.progress, self.plan
        steps, seconds = progress.steps, progress.seconds
        return TrainingMetrics(
            epoch=steps / plan.steps_per_epoch,
            global_step=steps,
            max_steps=plan.total_steps,
            best_global_step=progress.best_step,
            train_samples=len(self.inputs.examples["train"].labels),
            train_runtime=seconds,
            train_samples_per_second=progress.examples / seconds,
            train_steps_per_second=steps / seconds,
            train_loss=progress.loss_sum / steps,
            train_batch_size=self.trainer.batch_size.examples,
            train_peak_bytes=peak_bytes,
        )


def _check_resumable(inputs: RunInputs, folder: RunFolder) -> None:
    if not folder.can_resume:
        raise nothing_to_resume(folder)
    folder.check()
    Manifest.read(folder).check(Manifest.of(inputs), remedy="restore it, or start a new run")


def _prediction_rows(
    inputs: RunInputs, split: str, predicted: Predicted
) -> list[dict[str, object]]:
    """Return the rows of a split with predictions and losses, one dict per text."""
    rows = inputs.data.splits[split]
    columns = rows.select([name for name in rows.column_names if name not in ("label", "example")])
    # The predictions of all folds are joined later.
    is_fold = inputs.pool is not None
    predictions = inputs.task.prediction_rows(*predicted, all_scores=is_fold)
    both = zip(columns.to_pylist(), predictions, strict=True)
    near = mark_near_duplicates(rows, inputs.data.splits["train"]).tolist()
    return [
        {**texts, **values, "near_duplicate": is_near}
        for (texts, values), is_near in zip(both, near, strict=True)
    ]


def describe_facts(inputs: RunInputs, plan: Plan) -> RunFacts:
    """Describe model, data and device."""
    reasons = {choice.subject: choice.note for choice in plan.choices}
    trained, total = count_parameters(inputs.text_model.model.parameters())
    return RunFacts(
        data=inputs.config.data.data,
        class_names=list(inputs.task.class_names),
        model=inputs.config.model.model,
        mode=inputs.mode,
        device=inputs.device.name,
        device_description=inputs.device.description,
        precision=plan.precision,
        precision_reason=reasons.get("precision"),
        trained_parameters=trained,
        total_parameters=total,
        real_token_share=plan.real_token_fraction(inputs.examples["train"]),
    )


def _describe_details(
    inputs: RunInputs, plan: Plan, head: LinearHeadFitter | None, progress: Progress
) -> RunDetails:
    metric = choose_metric(plan.metric_for_best_model, inputs.task.problem_type)
    lengths = {}
    for split in inputs.data.splits:
        examples = inputs.examples[split]
        median, p95 = np.percentile(examples.lengths, (50, 95)).tolist()
        lengths[split] = {
            "texts": len(examples.labels),
            "windows": len(examples.lengths) if examples.windows else None,
            "cut": examples.truncated_texts,
            "median": median,
            "p95": p95,
            "longest": int(examples.lengths.max()),
        }
    return RunDetails(
        choices=plan.choices,
        lengths=lengths,
        class_rows=inputs.task.count_classes(inputs.examples["train"].labels),
        metric_for_best_model=metric.name,
        is_balanced=inputs.config.training.class_weights == "balanced",
        unlabeled=progress.unlabeled,
        names=head.names if head else "",
        drawn=None if inputs.data.drawn is None else len(inputs.data.drawn),
    )


@contextmanager
def interruption_explained(folder: RunFolder) -> Iterator[None]:
    """Convert KeyboardInterrupt to ``InterruptionError``, with the command that resumes the run."""
    try:
        yield
    except KeyboardInterrupt as stop:
        message = str(stop) or "stopped"
        if isinstance(folder, SeveralFolder):
            finished = sum(run.has_finished for run in folder.runs)
            message += f"; {finished} of {folder.count} {folder.run_kind}s have finished"
        overwrite = " with --overwrite" if folder.first_file.exists() else ""
        remedy = f"run the command again{overwrite}, because nothing was saved yet"
        if folder.can_resume:
            remedy = f"resume with: {folder.resume_command}"
        raise InterruptionError(message, remedy=remedy, signal_number=signal_of(stop)) from None


@contextmanager
def failures_explained(folder: RunFolder, inputs: RunInputs) -> Iterator[None]:
    """Add remedies if memory or disk space runs out, and the texts of a batch with a NaN loss."""
    device, resume = inputs.device, f"resume with: {folder.resume_command}"
    try:
        yield
    except LossNotFiniteError as error:
        train = inputs.data.splits["train"]["text"]
        # Class-name examples come after the rows.
        rows = [number for number in error.examples if number < len(train)]
        texts = ", ".join(repr(train[number].as_py()[:60]) for number in rows[:MAX_EXAMPLES])
        where = f", in a batch with texts such as {texts}" if texts else ""
        raise LossNotFiniteError(error.message + where, remedy=error.remedy) from error
    except BrokenPipeError:  # the terminal, not the run folder
        raise
    except Exception as error:
        if system_error(error) and (known := explain(error, path=folder.path)):
            then = f", then {resume}" if folder.can_resume else ""
            raise type(known)(known.message, remedy=known.remedy + then) from error
        if not device.memory.is_out_of_memory(error):
            raise
        batch_size = inputs.config.training.batch_size
        smaller = f"--batch-size {max(1, batch_size // 2) if isinstance(batch_size, int) else 1}"
        remedy = f"use {smaller} with the same --effective-batch-size, or lower --eval-batch-size"
        message = "ran out of memory where micro-batches can't be made smaller"
        raise BatchDoesNotFitError(
            f"{device.name} {message}",
            remedy=f"{resume} {smaller}" if folder.can_resume else remedy,
        ) from error
