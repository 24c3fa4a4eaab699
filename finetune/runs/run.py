"""One training of a text classifier, from its options to its results.

After ``prepare`` of prepare.py, ``Run.begin`` makes the plan and restores a checkpoint if it
resumes, ``Run.train`` takes the steps, ``Run.finish`` saves and evaluates the best model.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import distributed
from finetune.config.yaml_files import dump_config
from finetune.devices.base import move_to_device
from finetune.devices.host import kept_awake
from finetune.evaluation.statistics import measure_calibration
from finetune.events import Info, clock, emit, muted, sent_to, stage
from finetune.files import replacing, write_json, write_jsonl, write_text_atomically
from finetune.model.load import TextModel, load_pretrained, save_model
from finetune.model.lora import ADAPTER_CONFIG, Adapter
from finetune.model.structure import count_parameters
from finetune.runs.batch_sizes import make_batch_sizes
from finetune.runs.checkpoint import Checkpoints, nothing_to_resume
from finetune.runs.failures import failures_explained, interruption_explained
from finetune.runs.features import stored_features
from finetune.runs.folder import RunFolder
from finetune.runs.inference import write_confidences, write_inference
from finetune.runs.journal import Journal, continue_journal
from finetune.runs.linear_head import LinearHeadFitter
from finetune.runs.manifest import Manifest, read_environment, restore_threads, write_environment
from finetune.runs.plan import make_plan, resolve_config
from finetune.runs.prepare import RunInputs, keep_tables, prepare
from finetune.runs.request import RunRequest
from finetune.runs.results import (
    RunDetails,
    RunFacts,
    RunResults,
    TextLengths,
    TrainingMetrics,
    ValidationKind,
    with_intervals,
)
from finetune.runs.tracking import Tracking, tracked
from finetune.tasks.base import Labels, Task
from finetune.tasks.metrics import choose_metric
from finetune.tasks.scores import Scores
from finetune.tokenization.examples import Examples
from finetune.training.plan import Plan
from finetune.training.snapshot import Progress
from finetune.training.trainer import Trainer

Predicted = tuple[NDArray[np.float32], Labels]
WritePages = Callable[[RunFolder, RunResults], object]


@distributed.joined()
def train(request: RunRequest, *, write_pages: WritePages) -> RunResults:
    """Train a new or an interrupted run to its end.

    The folder of a new run is created first, and deleted if the run fails before it trains. With
    several ranks, each calls this; a run can resume with another number of ranks.
    """
    journal = Journal()
    lock = request.lock() if distributed.is_main() else nullcontext(RunFolder(Path()))
    with kept_awake(), lock as locked, interruption_explained(locked), sent_to(journal):
        folder = distributed.broadcast(lambda: locked)
        inputs = keep_tables(prepare(request.config, sources=request.sources), folder)
        with Run.begin(
            inputs, folder, journal=journal,
            resumes=bool(request.resumed), continues=request.continued,
        ) as run:  # fmt: skip
            run.train()
            results = run.finish(write_pages=write_pages)
        if request.config.data.private_data:
            folder.delete_tables()
        return results


class Run:
    """One training of a classifier, ready for its next step.

    The trainer has token ids and the whole model, or features and the trainable layers. ``journal``
    writes events to the folder; ``tracking`` reports some of them.
    """

    tracking: Tracking

    @classmethod
    @contextmanager
    def begin(
        cls,
        inputs: RunInputs,
        folder: RunFolder,
        *,
        resumes: bool,
        continues: RunFolder | None = None,
        measured: Plan | None = None,
        journal: Journal,
    ) -> Iterator["Run"]:
        """Yield a run in a folder that the main process has locked, and add remedies to its errors.

        To continue a finished run, the data must be the same.
        """
        with failures_explained(folder, inputs), sent_to(journal):
            if continues:
                saved, now = Manifest.read(continues), Manifest.of_data(inputs.data)
                remedy = "restore the data, or start a new run on it with --model"
                saved.check(now, remedy=f"{remedy} {continues.model_folder}")
            if resumes:
                distributed.broadcast(lambda: _check_resumable(inputs, folder))
                threads, choices = distributed.broadcast(lambda: read_environment(folder))
                restore_threads(threads)
            plan = make_plan(inputs, measured)
            if resumes:
                plan = replace(plan, choices=choices)
            run = cls(inputs, plan, folder, journal)
            if resumes:
                run.checkpoints.restore(run.trainer)
                emit(Info(f"resuming after step {run.progress.steps:,}"))
            if distributed.is_main():
                if resumes:
                    continue_journal(folder, steps=run.progress.steps)
                else:
                    folder.start()
                    replace(Manifest.of(inputs), options=run.config).write(folder)
                    write_text_atomically(folder.config_file, dump_config(run.config))
                    write_environment(folder, inputs, plan)
                journal.open(folder)
            with tracked(inputs.config, folder) as tracking, sent_to(tracking):
                run.tracking = tracking
                try:
                    yield run
                except BaseException:
                    # The other processes may be waiting in another collective.
                    if run.trainer.has_trained and distributed.world_size() == 1:
                        run.checkpoints.save(run.trainer)
                    raise

    def __init__(self, inputs: RunInputs, plan: Plan, folder: RunFolder, journal: Journal) -> None:
        self.inputs, self.plan, self.folder, self.journal = inputs, plan, folder, journal
        self.config, device = resolve_config(inputs, plan), inputs.device
        batch_size, eval_batch_size = make_batch_sizes(inputs, plan)
        device.choose_attention(longest_tokens=plan.padded_lengths[-1])
        # The pass through the frozen layers counts as training time.
        started = time.perf_counter()
        with stage("features"):
            model, examples = stored_features(inputs, plan, eval_batch_size)
        self.trainer = trainer = Trainer(
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
            # The same dropout on every rank would make the gradient noisier.
            torch.manual_seed(plan.seed + distributed.rank())
        self.head: LinearHeadFitter | None = None
        if plan.method.fits_head:
            with stage("cross-validate"):
                self.head = trainer.fitter = LinearHeadFitter(inputs, trainer)
        self._seconds_before_steps = time.perf_counter() - started

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        return self.trainer.progress

    def train(self) -> None:
        """Take the remaining steps; a signal raises ``Stopped``."""
        self.progress.seconds += self._seconds_before_steps
        self._seconds_before_steps = 0.0
        self.trainer.train()

    def _merge_adapter(self) -> tuple[TextModel, Adapter]:
        """Merge the adapter into the pretrained model, which makes all further predictions.

        So the evaluated model is exactly the saved model, in any precision of the frozen layers.
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
        """Save the best model, evaluate it on validation and test split, and write the results.

        A run is finished only after its pages are written. Without pages, as in a fold, only the
        configuration of the model is saved.
        """
        folder, is_main = self.folder, distributed.is_main()
        config_name = folder.model_config_file.name
        peak_bytes = self.inputs.device.memory.peak_bytes()
        self.checkpoints.load_best(self.trainer)
        saved, adapter = self.inputs.text_model, None
        if self.config.model.lora:
            saved, adapter = self._merge_adapter()
        task, validation = self._calibrate(saved)
        # The task of the inputs stays: the next seed starts from it.
        inputs = replace(self.inputs, text_model=replace(self.inputs.text_model, task=task))
        if is_main:
            with stage("saving"):
                saved = replace(saved, task=task)
                if write_pages:
                    self._save(saved, adapter, validation)
                else:
                    with replacing(folder.model_folder, last=config_name) as model_folder:
                        task.configure(saved.model.config)
                        saved.model.config.save_pretrained(model_folder)
        scores: Scores | None = None
        kind: ValidationKind | None = None
        if validation:
            scores, kind = task.score(*validation), "held out"
        elif self.head and self.head.cross_validated is not None:
            labels, kind = self.inputs.examples["train"].labels, "cross-validated"
            scores = self.inputs.task.score(self.head.cross_validated, labels)
        with stage("test"):
            test = self.trainer.predict("test")
            test_rows = _prediction_rows(inputs, "test", test)
            test_scores = with_intervals(task.score(*test), task, test_rows)
        results = RunResults(
            task=task,
            facts=describe_facts(inputs, self.plan),
            training=self._training_metrics(peak_bytes),
            details=_describe_details(inputs, self.plan, self.head),
            validation=scores,
            test=test_scores,
            calibration=measure_calibration(task, *test) if validation else None,
            validation_kind=kind,
            output_dir=str(folder.path),
        )
        if is_main:
            write_jsonl(folder.predictions_file, test_rows)
            if write_pages:
                with stage("report"):
                    write_pages(folder, replace(results, stage_seconds=clock.seconds()))
            # Last, because a run with results and without checkpoints is finished.
            results = replace(results, stage_seconds=clock.take())
            write_json(folder.results_file, results.to_json())
            self.journal.close()
            self.trainer.has_trained = False  # there is nothing left to resume
            folder.delete_checkpoints()
        self.tracking.report(
            "test", results.test.metrics, step=self.progress.steps, epoch=results.training.epoch
        )
        return results

    def _save(
        self, saved: TextModel, adapter: Adapter | None, validation: Predicted | None
    ) -> None:
        folder = self.folder
        if adapter and not saved.structure.mean_layer:
            save_adapter(adapter, saved, folder, max_length=self.config.model.max_length)
        with replacing(folder.model_folder, last=folder.model_config_file.name) as model_folder:
            options = self.config.model
            save_model(
                saved, model_folder, max_length=options.max_length, with_weights=options.merge
            )
        write_inference(
            folder, self.config, max_tokens=saved.max_tokens,
            reads_pairs="text_pair" in self.inputs.data.splits["train"].column_names,
        )  # fmt: skip
        if validation:
            write_confidences(folder, saved.task, *validation)

    @clock("validation")
    def _calibrate(self, text_model: TextModel) -> tuple[Task, Predicted | None]:
        """Calibrate the task on validation rows, and scale the output layer accordingly.

        Also return logits and labels of these rows for the scaled model; None without any rows.
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
            train_samples_per_second=steps * plan.effective_batch_size / seconds,
            train_steps_per_second=steps / seconds,
            train_loss=progress.loss_sum / steps,
            train_batch_size=self.trainer.batch_size.examples,
            train_peak_bytes=peak_bytes,
        )


def _check_resumable(inputs: RunInputs, folder: RunFolder) -> None:
    if not folder.can_resume:
        raise nothing_to_resume(folder)
    folder.check_names()
    Manifest.read(folder).check(Manifest.of(inputs), remedy="restore it, or start a new run")


def save_adapter(
    adapter: Adapter, merged: TextModel, folder: RunFolder, *, max_length: int
) -> None:
    """Write the adapter of a merged model, whose output layer may have been scaled since."""
    base, revision = merged.source.published
    with replacing(folder.adapter_folder, last=ADAPTER_CONFIG) as path:
        save_model(merged, path, max_length=max_length, with_weights=False)
        adapter.write(path, merged.model, merged.structure.head, base=base, revision=revision)


def _prediction_rows(
    inputs: RunInputs, split: str, predicted: Predicted
) -> list[dict[str, object]]:
    """Return the columns of a split with predictions and losses, one dict per text."""
    columns = inputs.data.splits[split].remove_columns("label").with_format("arrow")[:]
    # The predictions of a fold are later joined with the predictions of other folds.
    is_fold = inputs.pool is not None
    predictions = inputs.task.prediction_rows(*predicted, all_scores=is_fold)
    rows = zip(columns.to_pylist(), predictions, strict=True)
    return [{**texts, **values} for texts, values in rows]


def describe_facts(inputs: RunInputs, plan: Plan) -> RunFacts:
    """Return a description of model, data and device."""
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


def _describe_details(inputs: RunInputs, plan: Plan, head: LinearHeadFitter | None) -> RunDetails:
    metric = choose_metric(plan.metric_for_best_model, inputs.task.problem_type)
    return RunDetails(
        choices=plan.choices,
        lengths={split: _text_lengths(inputs.examples[split]) for split in inputs.data.splits},
        class_rows=inputs.task.count_classes(inputs.examples["train"].labels),
        metric_for_best_model=metric.name,
        is_balanced=inputs.config.training.class_weights == "balanced",
        unlabeled=head.unlabeled if head else None,
        names=head.names if head else "",
    )


def _text_lengths(examples: Examples) -> TextLengths:
    lengths = examples.lengths
    median, p95 = np.percentile(lengths, (50, 95)).tolist()
    windows = len(lengths) if examples.windows else None
    texts, cut = len(examples.labels), examples.truncated_texts
    return TextLengths(texts, windows, cut, median, p95, int(lengths.max()))
