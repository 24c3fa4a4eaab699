"""The training plan: method, steps, batches and learning rate.

In supervised contrastive training (Khosla et al. 2020, arXiv:2004.11362), texts of the same class
are pulled together, others pushed apart. The encoder is then interpolated with the pretrained
encoder (Wortsman et al. 2022, arXiv:2109.01903), and a linear head is fitted on its features.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from finetune.config.schema import OPTIONS, AutoTunedOption, Config
from finetune.tokenization.examples import Batch, Examples, plan_epoch


@dataclass(frozen=True)
class TrainingMethod:
    """What replaces plain fine-tuning, and the reason.

    ``is_contrastive``: the encoder is trained with a contrastive loss. ``fits_head``: a linear head
    is fitted after contrastive training, or on frozen-encoder features.
    ``uses_prototypes``: without labels, class prototypes form the head.
    """

    fits_head: bool = False
    is_contrastive: bool = False
    uses_prototypes: bool = False
    reason: str = field(default="", compare=False)

    @property
    def reads_texts(self) -> bool:
        """Whether the head also depends on unlabeled texts and class names."""
        return self.is_contrastive or self.uses_prototypes

    @property
    def takes_steps(self) -> bool:
        """Whether gradient descent takes any steps."""
        return self.is_contrastive or not self.fits_head


class HeadFitter(Protocol):
    """Fits a linear head after contrastive training or instead of training steps."""

    def start(self) -> None:
        """Prepare the training steps."""

    def finish(self) -> float:
        """Fit the head and return its loss."""


@dataclass(frozen=True)
class Plan:
    """All settings of a training run, and the numbers derived from them.

    The options in ``config`` are attributes of the plan. The learning rate warms up linearly and
    decays linearly to zero. Padded lengths ascend. ``pads_batches``: repeated examples fill up a
    batch with too few. ``choices``: the options chosen by measurement, with reasons.

    >>> from finetune.config.schema import change_options
    >>> options = change_options(Config(), {"learning_rate": 1.0, "warmup_fraction": 0.5})
    >>> plan = Plan(options, total_steps=4)
    >>> [plan.rate_at(step) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    config: Config
    _: KW_ONLY
    total_steps: int
    steps_per_epoch: int = 1
    examples_per_step: int = 1
    method: TrainingMethod = TrainingMethod()
    padded_lengths: Sequence[int] = ()
    pads_batches: bool = False
    is_padded_right: bool = True
    checks_device: bool = False
    choices: Sequence[AutoTunedOption] = ()

    def __getattr__(self, name: str) -> Any:
        """Return the value of an option."""
        if name not in OPTIONS:
            raise AttributeError(name)
        return OPTIONS[name].value_in(self.config)

    @property
    def warmup_steps(self) -> int:
        """Steps until the learning rate reaches its peak."""
        fraction: float = self.warmup_fraction
        return math.ceil(fraction * self.total_steps)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. It is never 0: no step is wasted."""
        peak: float = self.learning_rate
        if step < self.warmup_steps:
            return peak * (step + 1) / self.warmup_steps
        decaying = self.total_steps - self.warmup_steps
        return peak * (self.total_steps - step) / max(1, decaying)

    def batches(self, examples: Examples, *, epoch: int) -> list[Batch]:
        """Return the effective batches of an epoch, counted from 0."""
        if self.method.is_contrastive:
            lengths = np.asarray(self.padded_lengths)
            padded = lengths[np.searchsorted(lengths, examples.max_lengths)]
            random = np.random.default_rng([self.seed, epoch])
            has_parts = self.is_padded_right and not self.pads_batches
            draw = partial(draw_texts, examples.labels, padded, random, has_parts=has_parts)
            return [draw() for _ in range(self.total_steps)]
        return plan_epoch(
            examples.max_lengths,
            effective_batch_size=self.examples_per_step,
            padded_lengths=self.padded_lengths,
            seed=self.seed,
            epoch=epoch,
        )

    def describe(self, examples: Mapping[str, Examples]) -> str:
        """Return the message before the first step."""
        real = self.real_token_fraction(examples["train"])
        message = f"training: {self.total_steps:,} steps of {self.examples_per_step} examples"
        message += f", learning rate {self.learning_rate:g}, {real:.1%} non-padding tokens"
        patience = 0 if self.method.fits_head else self.early_stopping_patience
        if patience and "validation" in examples:
            message += f"; stops after {patience} validations without improvement"
        return message

    def real_token_fraction(self, examples: Examples) -> float:
        """Return the fraction of non-padding tokens in the first epoch."""
        tokens, padded_tokens = 0, 0
        filled_to = self.examples_per_step if self.pads_batches else 1
        for batch in self.batches(examples, epoch=0):
            sequences = examples.sequences_of(batch.indices)
            tokens += examples.lengths[sequences].sum()
            whole = [(max(len(sequences), filled_to), batch.padded_length)]
            padded_tokens += sum(rows * length for rows, length in batch.parts or whole)
        return float(tokens / padded_tokens)


# Twice as many steps give the same accuracy in twice the time, and temperatures of 0.05 and 0.2 are
# within two points. With 1.5 times the learning rate, few classes with 5 rows lose a point, and two
# with unlabeled texts (docs/measurements.md#few-labels).
MIN_STEPS, MAX_STEPS = 50, 200
# Passes over all rows, if the number of steps is within its limits.
PASSES = 2
TEXTS_PER_STEP = 64
CLASSES_PER_STEP = 16
# Half of a random TREC batch is padding. Split by length into four parts, it is a sixth.
PARTS_PER_STEP = 4
TEMPERATURE = 0.1


@contextmanager
def bypass_output_layer(model: nn.Module, output_layer: str) -> Iterator[None]:
    """Make a classifier return its output layer input instead of logits."""
    module = model.get_submodule(output_layer)
    module.forward = nn.Identity().forward
    try:
        yield
    finally:
        del module.forward


def contrastive_losses(
    embeddings: torch.Tensor, labels: torch.Tensor, loss_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of each example from embeddings [examples, hidden] and classes.

    Examples of weight zero are padding: other examples are neither pulled to them nor pushed away.
    """
    # Remove the mean, because an activation may have shifted all values.
    unit = functional.normalize(embeddings - embeddings.mean(dim=1, keepdim=True), dim=1)
    is_itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    is_left_out = is_itself | (loss_weights == 0)
    similarities = (unit @ unit.T / TEMPERATURE).masked_fill(is_left_out, -1e4)
    log_probabilities = similarities.log_softmax(dim=1)
    is_positive = (labels[:, None] == labels) & ~is_left_out
    losses = -(log_probabilities * is_positive).sum(dim=1)
    return losses / is_positive.sum(dim=1).clamp(min=1)


def count_steps(rows: int) -> int:
    """Return the number of steps for a table with this many rows."""
    return min(max(PASSES * rows // TEXTS_PER_STEP, MIN_STEPS), MAX_STEPS)


def draw_texts(
    classes: NDArray[np.int64],
    padded: NDArray[np.int64],
    random: np.random.Generator,
    *,
    has_parts: bool,
) -> Batch:
    """Draw the batch of a step: a few texts from each of several classes.

    Classes are drawn evenly, regardless of their number of rows. Classes with too few rows repeat
    rows, with different dropout. Texts are sorted by length and can go through the model in parts.
    Classes and padded lengths have the shape [rows].
    """
    names = np.unique(classes)
    count = min(CLASSES_PER_STEP, len(names))
    each, drawn = TEXTS_PER_STEP // count, []
    for number in random.choice(len(names), count, replace=False):
        rows = np.flatnonzero(classes == names[number])
        drawn.append(random.choice(rows, each, replace=len(rows) < each))
    indices = np.concatenate(drawn)
    indices = indices[np.argsort(-padded[indices], kind="stable")]
    slices = np.array_split(indices, PARTS_PER_STEP) if has_parts else []
    parts = [(len(part), int(padded[part].max())) for part in slices]
    return Batch(indices, int(padded[indices].max()), parts)


@torch.no_grad()
def interpolate(
    model: nn.Module, pretrained: Mapping[str, torch.Tensor], *, frozen_accuracy: float
) -> None:
    """Interpolate parameters toward their pretrained values.

    Training harms features that already separate the classes well
    (docs/measurements.md#few-labels).
    """
    share = 1 - frozen_accuracy / 2
    for name, before in pretrained.items():
        parameter = model.get_parameter(name)
        parameter.copy_(torch.lerp(before.to(parameter.device), parameter, share))
