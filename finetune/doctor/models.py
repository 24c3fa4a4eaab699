"""The models that the doctor compares and audits."""

import torch
from transformers import PreTrainedModel

from finetune.events import Emit
from finetune.model.load import load_model
from finetune.model.shape import count_positions
from finetune.tasks.single import Single

CLASSES = 6
SEED = 0


def pretrained_classifier(source: str, *, emit: Emit) -> PreTrainedModel:
    """Return a pretrained model with a new head, the same at every call.

    Args:
        source: A folder, a Hub id, or ``minilm``.
        emit: Receives progress events.

    Raises:
        FinetuneError: If there is no such model, or it is no text classifier.
    """
    torch.manual_seed(SEED)
    names = [str(number) for number in range(CLASSES)]
    return load_model(
        source, revision=None, task=Single(names), from_scratch=False, emit=emit
    ).model


def max_tokens(model: PreTrainedModel, *, wanted: int) -> int:
    """Return as many tokens a text as are wanted, or as the model has positions for."""
    return min(wanted, count_positions(model) or wanted)


def with_stars(name: str) -> str:
    """Put ``*`` in place of the numbers in a module's name, so that all layers have one."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
