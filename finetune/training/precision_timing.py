"""Whether steps are faster in bf16 than in fp32: some of each, in turn, on a copy of a model."""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from transformers import PreTrainedModel

from finetune.devices.base import Device
from finetune.devices.batch_size import BatchSize
from finetune.devices.precision import autocast
from finetune.model.freeze import set_training
from finetune.training.gradients import Losses
from finetune.training.micro_batches import StepPart
from finetune.training.out_of_memory import step_with_retries
from finetune.training.precision_result import PrecisionTiming
from finetune.training.training_state import Hyperparameters, TrainingState, prepare_training

_ROUNDS = 5
# Two rounds are enough where both gain more than the first, or less than the second.
_CLEAR_GAIN, _CLEAR_LOSS = 1.2, 0.9
# One step that takes so many times as long as in fp32 ends the timing.
_MAX_UPDATE = 2.0
# A CPU without instructions for bf16 took 7 times as long for a product, and 45 times for its
# gradients: one step would take minutes. On a GPU a product this small is bound by its launches,
# of which bf16 has twice as many.
_MAX_PRODUCT = 4.0
_PRODUCT_ROWS = 64


def time_precisions(
    model: PreTrainedModel,
    *,
    head: Set[str],
    losses: Losses,
    hyperparameters: Hyperparameters,
    cut: Callable[[int], Iterable[StepPart]],
    batch_size: BatchSize,
) -> PrecisionTiming:
    """Time steps on one batch in fp32 and in bf16.

    The model stays as it is, and so do the random numbers to come.

    Args:
        model: On the CPU or on the device, which gets a copy.
        head: Names of the head's parameters.
        losses: Gives the loss of each example.
        hyperparameters: Those of the run.
        cut: Cuts the batch into micro-batches of at most so many examples.
        batch_size: How many to begin with; fewer afterwards if they did not fit.

    Raises:
        BatchDoesNotFit: If not even one example fits beside the model.
    """
    device = batch_size.device
    products = {
        precision: _time_product(device, precision=precision, size=model.config.hidden_size)
        for precision in ("fp32", "bf16")
    }
    if products["bf16"] > _MAX_PRODUCT * products["fp32"]:
        return PrecisionTiming("product", products)
    random_state = device.random_state()
    prepare = partial(
        prepare_training, head=head, device=device, losses=losses, hyperparameters=hyperparameters
    )
    try:
        return _time_steps(_prepare_both(copy.deepcopy(model), prepare), cut, batch_size)
    finally:
        device.set_random_state(random_state)
        # Models that Accelerate has prepared refer to themselves.
        gc.collect()
        device.memory.release()


def _time_product(device: Device, *, precision: str, size: int) -> float:
    """Return the seconds of a product with its gradients, of the size of a feed-forward layer."""
    rows = torch.ones(_PRODUCT_ROWS, size, device=device.torch_device, requires_grad=True)
    matrix = torch.ones(4 * size, size, device=device.torch_device, requires_grad=True)

    def multiply() -> None:
        with autocast(device, precision=precision):
            product = torch.nn.functional.linear(rows, matrix)
        torch.autograd.grad(product.float().sum(), (rows, matrix))

    # The first warms up, unless one is enough to see that it takes long.
    return min(_time(multiply, device) for _ in range(2))


def _prepare_both(
    model: PreTrainedModel, prepare: Callable[..., TrainingState]
) -> dict[str, TrainingState]:
    """Return training states by precision, over the same parameters and optimizer state."""
    set_training(model)
    # A shallow copy has the same parameters and a forward of its own, to put into autocast.
    states = {
        precision: prepare(copy.copy(model), precision=precision) for precision in ("fp32", "bf16")
    }
    states["bf16"].optimizer.state = states["fp32"].optimizer.state
    return states


def _time_steps(
    states: Mapping[str, TrainingState],
    cut: Callable[[int], Iterable[StepPart]],
    batch_size: BatchSize,
) -> PrecisionTiming:
    # Where steps are captured, it is the second that is, and takes longer.
    warm_ups = 2 if batch_size.device.captures else 1
    seconds: dict[str, list[float]] = {precision: [] for precision in states}
    for _ in range(warm_ups + _ROUNDS):
        for precision, state in states.items():
            step = partial(step_with_retries, state, 0, cut=cut, batch_size=batch_size)
            seconds[precision].append(_time(step, batch_size.device))
        gains = [full / half for full, half in zip(*seconds.values(), strict=True)]
        if gains[-1] < 1 / _MAX_UPDATE or _is_clear(gains[warm_ups:]):
            break
    medians = {name: statistics.median(one[warm_ups:] or one) for name, one in seconds.items()}
    timing = PrecisionTiming("step", medians)
    if not timing.is_bf16_faster:
        return timing
    micro_batches = list(cut(batch_size.examples))
    exact, rounded = (_logits(state, micro_batches) for state in states.values())
    error = float((rounded - exact).norm() / exact.norm())
    return replace(timing, logits_error=error if error < 1 else 1.0)


def _is_clear(gains: Sequence[float]) -> bool:
    return len(gains) > 1 and (min(gains) > _CLEAR_GAIN or max(gains) < _CLEAR_LOSS)


def _time(work: Callable[[], object], device: Device) -> float:
    device.synchronize()
    started = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - started


def _logits(state: TrainingState, micro_batches: Sequence[StepPart]) -> torch.Tensor:
    state.model.train(False)
    with torch.inference_mode():
        inputs = chain.from_iterable(one.slices() for one in micro_batches)
        return torch.cat([state.model(**one).logits.float() for one in inputs])
