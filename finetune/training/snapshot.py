"""The state from which a resumed run continues bit-identically."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from pydantic import TypeAdapter

from finetune import distributed
from finetune.training.loop import Progress, TrainingLoop
from finetune.training.trainer import Trainer

Tensors = dict[str, torch.Tensor]


class StateUnusableError(Exception):
    """A loaded state is invalid or belongs to a different model."""


def trained_tensors(trainer: Trainer) -> Tensors:
    """Return the trainable parameters by name. Frozen parameters need not be saved."""
    return {name: weight.detach() for name, weight in trainer.trained_parameters().items()}


def load_trained_tensors(trainer: Trainer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy saved parameters back in place. Raise ``StateUnusableError`` if the names differ."""
    parameters = trained_tensors(trainer)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        raise StateUnusableError("its parameters belong to another model")
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def capture_state(trainer: TrainingLoop) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return everything that the next step depends on, from all ranks: tensors and JSON values."""
    optimizer = {
        f"{index}.{name}": torch.as_tensor(value)
        for index, values in trainer.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    main, *others = distributed.gather(trainer.device.random_state())
    random = dict(main)
    for index, of_rank in enumerate(others, start=1):
        random |= {f"{index}.{name}": state for name, state in of_rank.items()}
    tensors = {"model": trained_tensors(trainer), "optimizer": optimizer, "random": random}
    values = {"progress": asdict(trainer.progress), "gradient_scaler": trainer.scaler.state_dict()}
    return tensors, values


def restore_state(
    trainer: TrainingLoop, tensors: Mapping[str, Tensors], values: Mapping[str, Any]
) -> None:
    """Restore a trainer and its random state from a captured state."""
    try:
        load_trained_tensors(trainer, tensors["model"])
        _restore_optimizer(trainer.optimizer, tensors["optimizer"])
        trainer.scaler.load_state_dict(values["gradient_scaler"])
        random, index = tensors["random"], distributed.rank()
        prefix = f"{index}." if index else ""
        if f"{prefix}cpu" in random:  # unless the run had fewer ranks
            states = {name.removeprefix(prefix): state for name, state in random.items()}
            trainer.device.set_random_state(states)
        progress = TypeAdapter(Progress).validate_python(values["progress"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateUnusableError(f"its state is invalid ({error!r})") from error
    total_steps = trainer.plan.total_steps
    if not 0 <= progress.steps <= total_steps:
        raise StateUnusableError(
            f"it is from step {progress.steps:,}, but the run has {total_steps:,} steps"
        )
    trainer.progress = progress


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    state = defaultdict[int, Tensors](dict)
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state[int(index)][name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(state), "param_groups": groups})
