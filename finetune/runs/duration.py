"""Estimates the duration of a run from the time of a few steps."""

from functools import partial

import numpy as np

from finetune.events import clock
from finetune.model.structure import set_training
from finetune.runs.batch_sizes import make_batch_sizes
from finetune.runs.features import stores_features
from finetune.runs.prepare import RunInputs
from finetune.tokenization.examples import Batch, Examples
from finetune.training.micro_batches import move_batches
from finetune.training.plan import Plan
from finetune.training.trainer import Trainer

# The first step is not timed, because it has the most tokens and warms up the device.
TIMED_STEPS = 3
# Rows of the timed batch if the run takes no steps.
TIMED_ROWS = 256


def estimate_seconds(inputs: RunInputs, plan: Plan) -> float:
    """Return the expected seconds of the whole command, including the time so far.

    It times a few predictions and steps, which change the model. Time is proportional to tokens.
    """
    spent_seconds = sum(clock.seconds().values())
    text_model = inputs.text_model
    batch_size, eval_batch_size = make_batch_sizes(inputs, plan)
    trainer = Trainer(
        text_model.model,
        plan,
        task=inputs.task,
        device=inputs.device,
        head=text_model.structure.head,
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
    )
    examples = inputs.examples["train"]

    def tokens(batch: Batch) -> int:
        sequences = len(examples.sequences_of(batch.indices))
        return sum(
            rows * length for rows, length in batch.parts or [(sequences, batch.padded_length)]
        )

    batches = sorted(plan.batches(examples, epoch=0), key=tokens)
    timed = [batches[int(at)] for at in np.linspace(0, len(batches) - 1, TIMED_STEPS + 2)[1:-1]]
    timed_rows = np.concatenate([batch.indices for batch in timed])
    step_seconds = 0.0
    if plan.method.takes_steps:
        step_seconds = _time_steps(trainer, examples, [batches[-1], *timed])
        step_seconds /= sum(map(tokens, timed))
    else:
        timed_rows = timed_rows[:: 1 + len(timed_rows) // TIMED_ROWS]
    rows = examples.subset(examples.sequences_of(timed_rows))
    forward_seconds = trainer.device.time_calls(
        lambda: trainer.predictor.logits(rows, padded_lengths=plan.padded_lengths), calls=1
    ) / int(rows.lengths.sum())
    frozen_seconds = _frozen_share(inputs) * forward_seconds
    split_tokens = {name: int(split.lengths.sum()) for name, split in inputs.examples.items()}
    epochs = plan.total_steps / plan.steps_per_epoch
    step_tokens = sum(map(tokens, batches)) / len(batches) * plan.total_steps
    # One evaluation after each epoch, and one of the final model.
    predicted_tokens = split_tokens.get("validation", 0) * (epochs + 1) + split_tokens["test"]
    return (
        spent_seconds
        + sum(split_tokens.values()) * frozen_seconds
        + step_tokens * max(0.0, step_seconds - frozen_seconds)
        + predicted_tokens * max(0.0, forward_seconds - frozen_seconds)
    )


def _time_steps(trainer: Trainer, examples: Examples, batches: list[Batch]) -> float:
    """Return the seconds of all steps over batches except the first."""
    set_training(trainer.model)
    seconds = []
    moved = move_batches(examples, batches, device=trainer.device)
    for number, (_, cut) in enumerate(moved):
        step = partial(trainer.step, number, cut)
        if trainer.captured:
            step()  # captures the CUDA graph
        seconds.append(trainer.device.time_calls(step, calls=1))
    return sum(seconds[1:])


def _frozen_share(inputs: RunInputs) -> float:
    """Return the fraction of encoder layers that run only once per text."""
    layers = inputs.text_model.structure.layers
    if not layers or not stores_features(inputs.config.cache, inputs.mode):
        return 0.0
    parameters = dict(inputs.text_model.model.named_parameters())
    frozen = [all(not parameters[name].requires_grad for name in layer) for layer in layers]
    return sum(frozen) / len(layers)
