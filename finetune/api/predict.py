"""``finetune predict`` as a function."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.devices.names import DeviceName
from finetune.errors import UsageError
from finetune.events import Emit, ignore
from finetune.runs.folder import open_run_folder

if TYPE_CHECKING:
    from finetune.evaluation.answers import Answer

# Texts are encoded and kept in memory in slices of this size; within one, texts of like length
# share a batch.
TEXTS_A_SLICE = 10_000


def predict(
    run: str | Path,
    texts: Sequence[str],
    *,
    device: DeviceName = "auto",
    emit: Emit = ignore,
) -> "list[Answer]":
    """Classify texts, as ``finetune predict`` does.

    Args:
        run: The run folder.
        texts: In any number; the answers have their order.
        device: ``auto``, ``mps``, ``cpu`` or ``cuda``.
        emit: Is called with the events of ``finetune.events``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    if isinstance(texts, str):
        raise UsageError("a text was given in place of a list of texts", remedy="write [text]")
    folder = open_run_folder(Path(run))
    from finetune.runs.trained import TrainedModel

    model = TrainedModel.load(folder, device=device, emit=emit)
    slices = (texts[start : start + TEXTS_A_SLICE] for start in range(0, len(texts), TEXTS_A_SLICE))
    return [answer for one in slices for answer in model.answer(one)]
