"""What a run leaves when its updates are done: the best model and its figures."""

import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from finetune.events import Emit, Stage
from finetune.files import read_jsonl, write_json, write_jsonl
from finetune.model.freeze import count_parameters
from finetune.model.save import save_classifier
from finetune.pipeline.plan import TrainingPlan
from finetune.pipeline.predict import answers
from finetune.pipeline.prepare import Prepared
from finetune.pipeline.score import score_examples
from finetune.report.card import write_model_card
from finetune.report.write import write_report
from finetune.runs.checkpoint import read_checkpoint
from finetune.runs.folder import RunFolder
from finetune.tokenization.examples import Examples
from finetune.training.out_of_memory import BatchSizes
from finetune.training.snapshot import Progress, load_trained_tensors
from finetune.training.training_state import TrainingState

BEST_CHECKPOINT = "best"
RESULTS_SCHEMA_VERSION = 1


def finish(
    folder: RunFolder,
    prepared: Prepared,
    plan: TrainingPlan,
    sizes: BatchSizes,
    training_state: TrainingState,
    examples: Mapping[str, Examples],
    progress: Progress,
    *,
    emit: Emit,
) -> dict[str, Any]:
    """Save the best model, try it on the held-out splits, and write figures, report and card.

    Returns:
        The figures of ``all_results.json``, and ``output_dir``.
    """
    peak_bytes = prepared.device.memory.peak_bytes()
    best_folder = folder.checkpoints_folder / BEST_CHECKPOINT
    tensors, _ = read_checkpoint(best_folder)
    load_trained_tensors(training_state, tensors["model"])
    save_classifier(prepared.classifier, folder.model_folder)
    results = {
        "schema_version": RESULTS_SCHEMA_VERSION,
        **_facts(prepared, plan),
        **_training_metrics(plan, progress),
        "train_batch_size": sizes.training.rows,
        "train_peak_bytes": peak_bytes,
    }
    emit(Stage("evaluating the best model"))
    for split, prefix in (("validation", "eval"), ("test", "test")):
        if split in examples:
            metrics, logits = score_examples(
                training_state.model,
                examples[split],
                prepared,
                padded_lengths=plan.padded_lengths,
                batch_size=sizes.evaluation,
            )
            results[f"{prefix}_samples"] = len(logits)
            results |= {f"{prefix}_{name}": value for name, value in metrics.items()}
    write_jsonl(folder.predictions_file, _prediction_rows(prepared.table["test"], logits))
    write_json(folder.state_file, _trainer_state(folder, plan, progress))
    write_json(folder.results_file, results)
    write_model_card(folder)
    write_report(folder)
    shutil.rmtree(best_folder)
    return {**results, "output_dir": str(folder.path)}


def _facts(prepared: Prepared, plan: TrainingPlan) -> dict[str, Any]:
    trained, total = count_parameters(prepared.classifier.model)
    config = prepared.config
    return {
        "data": config.data.data,
        "class_names": prepared.classifier.class_names,
        "model": config.model.model,
        "mode": prepared.mode,
        "device": prepared.device.name,
        "device_description": prepared.device.description,
        "precision": config.training.precision,
        "trained_parameters": trained,
        "total_parameters": total,
        "real_token_share": plan.real_token_share(),
    }


def _training_metrics(plan: TrainingPlan, progress: Progress) -> dict[str, Any]:
    """Return the Trainer's figures under the Trainer's names."""
    epochs = progress.updates / plan.updates_per_epoch
    return {
        "epoch": epochs,
        "train_samples": len(plan.lengths),
        "train_runtime": progress.seconds,
        "train_samples_per_second": len(plan.lengths) * epochs / progress.seconds,
        "train_steps_per_second": progress.updates / progress.seconds,
        "train_loss": progress.loss_sum / progress.updates,
    }


def _trainer_state(folder: RunFolder, plan: TrainingPlan, progress: Progress) -> dict[str, Any]:
    return {
        "global_step": progress.updates,
        "max_steps": plan.schedule.total_updates,
        "num_train_epochs": plan.num_train_epochs,
        "epoch": progress.updates / plan.updates_per_epoch,
        # The score of a loss is its negative.
        "best_metric": progress.best_score and abs(progress.best_score),
        "best_global_step": progress.best_updates,
        "log_history": read_jsonl(folder.metrics_file),
    }


def _prediction_rows(rows: Dataset, logits: NDArray[np.float32]) -> list[dict[str, Any]]:
    """Return each row's text, true class, predicted class and its probability."""
    feature = rows.features["label"]
    predicted = answers(rows["text"], logits, feature.names)
    return [
        {
            "text": answer["text"],
            "label": feature.int2str(label),
            "predicted": answer["label"],
            "probability": answer["probability"],
        }
        for answer, label in zip(predicted, rows["label"], strict=True)
    ]
