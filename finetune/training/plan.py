"""The plan of a training: its method, steps, batches and learning rate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from finetune.config.schema import AutoTunedOption, SaveStrategy
from finetune.tokenization.buckets import Batch, plan_epoch
from finetune.tokenization.examples import Examples
from finetune.training.contrastive import plan_contrast


@dataclass(frozen=True)
class TrainingMethod:
    """What replaces plain fine-tuning, and why.

    ``is_contrastive``: the encoder is trained with a contrastive loss. ``fits_head``: a linear head
    is fitted after contrastive training, or on the features of the frozen encoder.
    """

    fits_head: bool = False
    is_contrastive: bool = False
    reason: str = field(default="", compare=False)

    @property
    def takes_steps(self) -> bool:
        """Whether gradient descent takes any steps."""
        return self.is_contrastive or not self.fits_head


class HeadFitter(Protocol):
    """Fits a linear head, after contrastive training or instead of training steps."""

    def start(self) -> None:
        """Prepare the training steps."""

    def finish(self) -> float:
        """Fit the head and return its loss."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every number of a training. The defaults are for a few steps without a run.

    The learning rate warms up linearly to ``peak`` and decays linearly to zero. Padded lengths
    ascend. ``pads_batches``: repeated examples fill up a batch with too few. ``patience``:
    validations in a row without a better score or a lower loss after which training stops; 0 never.
    ``choices`` are the options chosen by measurement.

    >>> plan = Plan(peak=1.0, warmup_steps=2, total_steps=4)
    >>> [plan.rate_at(step) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    head_lr_multiplier: float = 1.0
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    precision: str = "fp32"
    method: TrainingMethod = TrainingMethod()
    seed: int = 0
    batch_size: int | Literal["auto"] = 1
    eval_batch_size: int = 1
    gradient_checkpointing: bool = False
    padded_lengths: Sequence[int] = ()
    pads_batches: bool = False
    is_padded_right: bool = True
    effective_batch_size: int = 1
    steps_per_epoch: int = 1
    num_train_epochs: float = 1.0
    logging_steps: int = 1
    patience: int = 0
    saves: SaveStrategy = "no"
    save_steps: int = 1
    metric_for_best_model: str | None = None
    checks_device: bool = False
    choices: Sequence[AutoTunedOption] = ()

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0; never zero, so no step is wasted."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decaying = self.total_steps - self.warmup_steps
        return self.peak * (self.total_steps - step) / max(1, decaying)

    def batches(self, examples: Examples, *, epoch: int) -> list[Batch]:
        """Return the effective batches of an epoch, counted from 0."""
        if self.method.is_contrastive:
            return plan_contrast(
                examples.labels,
                examples.max_lengths,
                padded_lengths=self.padded_lengths,
                is_padded_right=self.is_padded_right and not self.pads_batches,
                steps=self.total_steps,
                seed=self.seed,
                epoch=epoch,
            )
        return plan_epoch(
            examples.max_lengths,
            effective_batch_size=self.effective_batch_size,
            padded_lengths=self.padded_lengths,
            seed=self.seed,
            epoch=epoch,
        )

    def describe(self, examples: Mapping[str, Examples]) -> str:
        """Return the message before the first step."""
        message = f"training: {self.total_steps:,} steps of {self.effective_batch_size} examples"
        real = self.real_token_fraction(examples["train"])
        message += f", learning rate {self.peak:g}, {real:.1%} of the tokens are not padding"
        if self.patience and "validation" in examples:
            message += f"; it stops after {self.patience} validations without improvement"
        return message

    def real_token_fraction(self, examples: Examples) -> float:
        """Return the fraction of the first epoch's tokens that are not padding."""
        tokens, padded_tokens = 0, 0
        filled_to = self.effective_batch_size if self.pads_batches else 1
        for batch in self.batches(examples, epoch=0):
            sequences = examples.sequences_of(batch.indices)
            tokens += examples.lengths[sequences].sum()
            whole = [(max(len(sequences), filled_to), batch.padded_length)]
            padded_tokens += sum(rows * length for rows, length in batch.parts or whole)
        return float(tokens / padded_tokens)
