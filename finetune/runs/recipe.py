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
    training, obstacle = config.training, _find_obstacle(config, processes=processes)
    if config.model.mode.trains_encoder:
        option, choice = "contrastive", training.contrastive
        if training.solve_head == "on" and choice == "off":
            obstacle = "--solve-head on needs a frozen encoder, or contrastive steps"
        elif task.name != "single":
            obstacle = f"the task is {task.name}"
        elif training.label_smoothing:
            obstacle = "the labels are smoothed"
        rows_a_class = rows / max(len(task.class_names), 1)
        is_due = rows_a_class <= MAX_ROWS_A_CLASS and training.solve_head != "off"
        reason = f"{rows_a_class:.0f} rows a class are few: contrastive steps, then a solved head"
    else:
        option, choice, is_due = "solve-head", training.solve_head, True
        reason = "the output layer is solved on the features of the frozen encoder"
    if choice == "on" or (option == "contrastive" and training.solve_head == "on"):
        if obstacle:
            raise ConfigurationInvalid(
                f"--{option} on can't be used: {obstacle}", remedy=f"use --{option} auto"
            )
    elif (
        choice == "off"
        or obstacle
        or not is_due
        or any(getattr(training, name) is not None for name in _STEP_OPTIONS)
    ):
        return Recipe()
    return Recipe(True, is_contrastive=option == "contrastive", reason=reason)


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
