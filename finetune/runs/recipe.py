"""How a run trains where rows are few or only an output layer trains: chosen before all else."""

from dataclasses import dataclass

from finetune.config.schema import Config
from finetune.errors import ConfigurationInvalid
from finetune.tasks.base import Task

# With more, plain fine-tuning is as good and takes less time (docs/measurements.md).
MAX_ROWS_A_CLASS = 100
# Options of training by steps; who gives one wants its steps.
_STEP_OPTIONS = ("learning_rate", "num_train_epochs", "max_steps")


@dataclass(frozen=True)
class Recipe:
    """What replaces the steps of plain fine-tuning, and why.

    With ``is_contrastive`` the encoder takes contrastive steps; with ``solves_head`` the output
    layer is solved, after these or on the features of the frozen encoder.
    """

    solves_head: bool = False
    is_contrastive: bool = False
    reason: str = ""


def choose_recipe(config: Config, task: Task, *, rows: int, processes: int) -> Recipe:
    """Return what ``contrastive`` and ``solve_head`` make of a configuration and its rows.

    Raises:
        ConfigurationInvalid: If one of them is on where it can't be.
    """
    training, mode = config.training, config.model.mode
    obstacle = _find_obstacle(config, processes=processes)
    steps = next((name for name in _STEP_OPTIONS if getattr(training, name) is not None), None)
    given = obstacle or (f"--{steps.replace('_', '-')} is given" if steps else None)

    if mode.trains_encoder:
        wrong_task = None if task.name == "single" else f"the task is {task.name}"
        rows_a_class = rows / max(len(task.class_names), 1)
        if training.contrastive == "on":
            _refuse("contrastive", wrong_task or obstacle)
        elif training.contrastive == "off" or wrong_task or given or training.solve_head == "off":
            return Recipe()
        elif rows_a_class > MAX_ROWS_A_CLASS:
            return Recipe()
        reason = f"{rows_a_class:.0f} rows a class are few: contrastive steps, then a solved head"
        return Recipe(solves_head=True, is_contrastive=True, reason=reason)
    if training.contrastive == "on":
        _refuse("contrastive", f"nothing but the head trains in mode {mode}")
    if training.solve_head == "on":
        _refuse("solve-head", obstacle)
    elif training.solve_head == "off" or given:
        return Recipe()
    return Recipe(solves_head=True, reason="the head is solved on the features of the encoder")


def _find_obstacle(config: Config, *, processes: int) -> str | None:
    """Return why no head can be solved."""
    training, model = config.training, config.model
    if processes > 1:
        return f"there are {processes} processes"
    if training.loss == "focal":
        return "the loss is focal, which has no single optimum"
    if model.long_texts == "windows" and model.window_pooling != "mean":
        return f"windows are pooled by {model.window_pooling}"
    return None


def _refuse(option: str, reason: str | None) -> None:
    if reason:
        raise ConfigurationInvalid(
            f"--{option} on can't be used: {reason}", remedy=f"use --{option} auto"
        )
