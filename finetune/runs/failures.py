"""Remedies if a run is interrupted, can't be written, runs out of memory or diverges."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import (
    BatchDoesNotFitError,
    FinetuneError,
    InterruptionError,
    LossNotFiniteError,
    explain,
    system_error,
)
from finetune.runs.folder import RunFolder, SeveralFolder
from finetune.runs.prepare import RunInputs
from finetune.training.interruption import signal_of

MAX_EXAMPLES = 3


@contextmanager
def interruption_explained(folder: RunFolder) -> Iterator[None]:
    """Turn KeyboardInterrupt into ``InterruptionError``, with the command that resumes the run."""
    try:
        yield
    except KeyboardInterrupt as stop:
        message, can_resume = str(stop) or "stopped", folder.can_resume
        if isinstance(folder, SeveralFolder):
            finished = sum(run.has_finished for run in folder.runs)
            message += f"; {finished} of {folder.count} {folder.run_kind}s have finished"
            can_resume = folder.has_progress
        if can_resume:
            remedy = f"resume with: {folder.resume_command}"
        else:
            overwrite = " with --overwrite" * folder.first_file.exists()
            remedy = f"run the command again{overwrite}, because nothing was saved yet"
        raise InterruptionError(message, remedy=remedy, signal_number=signal_of(stop)) from None


@contextmanager
def failures_explained(folder: RunFolder, inputs: RunInputs) -> Iterator[None]:
    """Add remedies if memory or disk space runs out, and the texts that have a loss of NaN."""
    device = inputs.device
    try:
        yield
    except LossNotFiniteError as error:
        rows = inputs.data.splits["train"].select(error.examples[:MAX_EXAMPLES])
        texts = [repr(text[:60]) for text in rows["text"]]
        if more := len(error.examples) - len(texts):
            texts.append(f"{more:,} more")
        where = f", in a batch with the texts {', '.join(texts)}" if texts else ""
        raise LossNotFiniteError(error.message + where, remedy=error.remedy) from error
    except BrokenPipeError:  # about the terminal, not the run folder
        raise
    except Exception as error:
        if cause := system_error(error):
            raise _explain_unwritten(folder, cause) from error
        if not device.memory.is_out_of_memory(error):
            raise
        batch_size = inputs.config.training.batch_size
        smaller = f"--batch-size {max(1, batch_size // 2) if isinstance(batch_size, int) else 1}"
        remedy = f"use {smaller} with the same --effective-batch-size, or lower --eval-batch-size"
        if folder.can_resume:
            remedy = f"resume with: {folder.resume_command} {smaller}"
        message = "ran out of memory in work that can't be repeated in smaller micro-batches"
        raise BatchDoesNotFitError(f"{device.name} {message}", remedy=remedy) from error


def _explain_unwritten(folder: RunFolder, error: OSError) -> Exception:
    name = error.filename
    if name and folder.path.resolve() not in Path(name).resolve().parents:
        return explain(error) or error
    has_model = folder.model_config_file.exists()
    where = f"the model is in {folder.model_folder}; " if has_model else ""
    then = f", then resume with: {folder.resume_command}" if folder.can_resume else ""
    return FinetuneError(
        f"{folder.path} can't be written: {error.strerror or error}",
        remedy=f"{where}free disk space, or make the folder writable{then}",
    )
