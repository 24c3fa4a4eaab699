"""What must be remembered to go on with a run bit for bit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from finetune.training.step import TrainingState

Tensors = dict[str, torch.Tensor]


class StateUnusable(Exception):
    """A state that was read makes no sense, or is not of this model."""


@dataclass
class Progress:
    """How far a run has come. The order of the rows follows from it and the seed.

    Args:
        steps: Steps done.
        seconds: Training time so far, validation excluded.
        loss_sum: Sum of the losses of all steps.
        best_score: Highest validation score so far, if there was one.
        best_step: Steps done when it was reached; 0 before there was one.
        lowest_loss: Lowest validation loss so far, if there was one.
        validations_since_best: Validations in a row that improved neither score nor loss.
    """

    steps: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    best_score: float | None = None
    best_step: int = 0
    lowest_loss: float | None = None
    validations_since_best: int = 0

    def note_validation(self, *, score: float, loss: float) -> bool:
        """Take in a validation; return whether its score, higher is better, is the best so far.

        The accuracy on a few rows stands still while the model learns: training has stopped
        improving only where the loss no longer falls either.
        """
        is_best = self.best_score is None or score > self.best_score
        is_lowest = self.lowest_loss is None or loss < self.lowest_loss
        if is_best:
            self.best_score, self.best_step = score, self.steps
        if is_lowest:
            self.lowest_loss = loss
        self.validations_since_best = 0 if is_best or is_lowest else self.validations_since_best + 1
        return is_best


def trained_tensors(training_state: TrainingState) -> Tensors:
    """Return the parameters that train, by name; what is frozen need not be saved."""
    return {name: one.detach() for name, one in training_state.trained_parameters().items()}


def load_trained_tensors(
    training_state: TrainingState, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy saved parameters back into the model, in place.

    Raises:
        StateUnusable: If they are not those of this model that train.
    """
    parameters = training_state.trained_parameters()
    if _shapes(tensors) != _shapes(parameters):
        raise StateUnusable("its parameters are not those of the model")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def capture_state(
    training_state: TrainingState, progress: Progress
) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return all that the next step depends on, as groups of tensors and as JSON values.

    Of several processes each calls it: only their random states differ.
    """
    optimizer_tensors = {
        # One count of steps may be that of many parameters, which a checkpoint keeps apart.
        f"{index}.{name}": tensor.clone() if tensor.ndim == 0 else tensor
        for index, values in training_state.optimizer.state_dict()["state"].items()
        for name, tensor in zip(values, map(torch.as_tensor, values.values()), strict=True)
    }
    tensors = {
        "model": trained_tensors(training_state),
        "optimizer": optimizer_tensors,
        "random": _random_states(training_state),
    }
    return tensors, {
        "progress": asdict(progress),
        "gradient_scaler": training_state.accelerator.scaler_state(),
    }


def restore_state(
    training_state: TrainingState, tensors: Mapping[str, Tensors], state: Mapping[str, Any]
) -> Progress:
    """Put a training state, and the random numbers to come, where a captured state was.

    Raises:
        StateUnusable: If the state makes no sense or is not of this model.
    """
    try:
        load_trained_tensors(training_state, tensors["model"])
        _restore_optimizer(training_state.optimizer, tensors["optimizer"])
        training_state.accelerator.load_scaler_state(state["gradient_scaler"])
        _set_random_state(training_state, tensors["random"])
        progress = TypeAdapter(Progress).validate_python(state["progress"])
        is_possible = 0 <= progress.steps <= training_state.schedule.total_steps
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateUnusable(f"its state makes no sense ({error!r})") from error
    if not is_possible:
        total = training_state.schedule.total_steps
        raise StateUnusable(f"it is of step {progress.steps:,}, and the run has {total:,}")
    return progress


def _random_states(training_state: TrainingState) -> Tensors:
    """Return the random states of all processes; those of others than the main one by index."""
    main, *others = training_state.processes.gather(training_state.device.random_state())
    named = (
        (f"{index}.{name}", one)
        for index, state in enumerate(others, start=1)
        for name, one in state.items()
    )
    return main | dict(named)


def _set_random_state(training_state: TrainingState, states: Tensors) -> None:
    """Restore this process's random numbers; where there were fewer processes, keep its own."""
    index = training_state.processes.index
    own = {name.removeprefix(f"{index}."): one for name, one in states.items()} if index else states
    if index == 0 or f"{index}.cpu" in states:
        training_state.device.set_random_state(own)


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    optimizer_state: dict[int, Tensors] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        optimizer_state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
