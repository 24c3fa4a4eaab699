"""Out-of-memory errors in training, evaluation and prediction, simulated with PyTorch messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_runs import finish_run, largest_difference, parameters_of, prepare_tiny, train_tiny
from tiny_runs import have_same_bits
from torch import nn

from finetune.errors import BatchDoesNotFitError
from finetune.events import Event, Validation, WarningMessage, sent_to
from finetune.files import read_json
from finetune.runs.folder import RunFolder
from finetune.runs.run import failures_explained

OUT_OF_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 12582912 bytes. Error code 12 (Cannot allocate memory)"
)
MANY = 10_000


@contextmanager
def memory_for(*, training_examples: int = MANY, evaluation_examples: int = MANY) -> Iterator[None]:
    """Make PyTorch raise out-of-memory errors for batches above these sizes."""

    def check(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        most = training_examples if torch.is_grad_enabled() else MANY
        if torch.is_inference_mode_enabled():
            most = evaluation_examples
        if isinstance(module, nn.Linear) and len(inputs[0]) > most:
            raise RuntimeError(OUT_OF_MEMORY)

    hook = nn.modules.module.register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def warnings_of(emitted: list[Event]) -> list[str]:
    """Return the warnings about memory. The questions also cause warnings about long texts."""
    messages = [event.message for event in emitted if isinstance(event, WarningMessage)]
    return [message for message in messages if "memory" in message]


def test_run_continues_with_smaller_batches_and_equal_weights(
    model_without_dropout: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model": model_without_dropout, "effective_batch_size": 16}
    # Rounding errors don't show in such small steps.
    options |= {"learning_rate": 1e-5, "head_lr_multiplier": 1, "max_train_samples": 32}
    expected = train_tiny(tmp_path / "smaller", batch_size=4, **options)
    emitted: list[Event] = []

    with memory_for(training_examples=7), sent_to(emitted.append):
        run = train_tiny(tmp_path / "run", batch_size=16, **options)

    assert warnings_of(emitted) == [
        "cpu ran out of memory: the batch size is now 8 instead of 16",
        "cpu ran out of memory: the batch size is now 4 instead of 8",
    ]
    assert run.progress.loss_sum == pytest.approx(expected.progress.loss_sum, abs=1e-5)
    assert largest_difference(parameters_of(run), parameters_of(expected)) < 1e-6
    assert finish_run(run).training.train_batch_size == 4
    assert read_json(tmp_path / "run" / "all_results.json")["train_batch_size"] == 4


def test_evaluation_continues_with_smaller_batches(tiny_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_train_samples": 32}
    whole = train_tiny(tmp_path / "whole", model=tiny_folder, **options)
    expected = finish_run(whole)
    emitted: list[Event] = []

    with memory_for(evaluation_examples=20):
        with sent_to(emitted.append):
            run = train_tiny(tmp_path / "run", model=tiny_folder, **options)
        results = finish_run(run)

    # Once, for all splits.
    assert warnings_of(emitted) == [
        "cpu ran out of memory: the evaluation batch size is now 32 instead of 64",
        "cpu ran out of memory: the evaluation batch size is now 16 instead of 32",
    ]
    assert len([event for event in emitted if isinstance(event, Validation)]) == 2
    assert results.training.train_batch_size == 16
    assert have_same_bits(parameters_of(run), parameters_of(whole))
    assert results.test.loss == pytest.approx(expected.test.loss, abs=1e-6)
    assert results.test.accuracy == expected.test.accuracy


@pytest.mark.parametrize("examples", ["training_examples", "evaluation_examples"])
def test_single_example_that_does_not_fit_ends_the_run_with_a_remedy(
    examples: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with (
        memory_for(**{examples: 0}),
        pytest.raises(BatchDoesNotFitError, match="single example") as raised,
    ):
        train_tiny(tmp_path / "run", model=tiny_folder, max_steps=1)
    assert raised.value.exit_code == 5
    assert "--max-length" in raised.value.remedy


def test_other_out_of_memory_errors_suggest_half_the_batch_size(
    tiny_folder: Path, tmp_path: Path
) -> None:
    inputs = prepare_tiny(tiny_folder, batch_size=16)
    with (
        pytest.raises(BatchDoesNotFitError) as raised,
        failures_explained(RunFolder(tmp_path), inputs),
    ):
        raise MemoryError
    assert "--batch-size 8" in raised.value.remedy
    checkpoint = tmp_path / "checkpoints" / "step-4" / "manifest.json"
    checkpoint.parent.mkdir(parents=True)
    for file in (checkpoint, tmp_path / "config.yaml"):
        file.touch()
    with (
        pytest.raises(BatchDoesNotFitError, match="ran out of memory") as raised,
        failures_explained(RunFolder(tmp_path), inputs),
    ):
        raise MemoryError
    assert raised.value.remedy.endswith(f"--resume-from-checkpoint {tmp_path} --batch-size 8")
