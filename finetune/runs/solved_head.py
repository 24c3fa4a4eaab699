"""The output layer of a run, solved on the features of its training rows."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.model.load import TextModel
from finetune.runs.recipe import Recipe
from finetune.tasks.base import Task
from finetune.tokenization.examples import Examples
from finetune.training.contrastive import giving_embeddings, interpolate, trained_share
from finetune.training.linear_head import (
    DEFAULT_STRENGTH,
    LabelledFeatures,
    LinearHead,
    choose_strength,
    cross_validate,
    solve,
)
from finetune.training.step import TrainingState


class HeadSolver:
    """Solves the output layer of a model in training, and tells how good a solved one is.

    ``predict`` returns the model's logits of the training rows. ``cross_validated`` are those of
    heads on the frozen encoder, each solved without the row.
    """

    def __init__(
        self,
        state: TrainingState,
        text_model: TextModel,
        examples: Examples,
        recipe: Recipe,
        predict: Callable[[], NDArray[np.float32]],
        *,
        has_validation: bool,
        seed: int,
    ) -> None:
        self._state, self._text_model, self._examples = state, text_model, examples
        self._recipe, self._predict = recipe, predict
        self.output_layer = next(iter(text_model.structure.output_layer)).rpartition(".")[0]
        rows = self._read_features()
        strength, logits = DEFAULT_STRENGTH, None
        if not recipe.is_contrastive:
            strength, logits = choose_strength(rows, seed=seed)
        # Before any contrastive step: afterwards the encoder knows all labels.
        self.cross_validated: NDArray[np.float32] | None = None
        if recipe.is_contrastive or not has_validation:
            if logits is None:
                logits = cross_validate(rows, [strength], seed=seed)[strength]
            self.cross_validated = logits
        self._strength = strength
        self._pretrained = {
            name: one.detach().to("cpu", copy=True)
            for name, one in state.trained_parameters().items()
            if recipe.is_contrastive
        }

    def finish(self) -> LinearHead:
        """Interpolate an encoder that has taken contrastive steps, and solve the output layer."""
        if self._recipe.is_contrastive and self.cross_validated is not None:
            predicted = self._text_model.task.read_logits(self.cross_validated).predicted
            accuracy = float((predicted == self._examples.labels).mean())
            interpolate(self._state.model, self._pretrained, share=trained_share(accuracy))
        head = solve(self._read_features(), strength=self._strength)
        with torch.no_grad():
            for parameter in self._text_model.output_parameters:
                values = head.bias if parameter.ndim == 1 else head.weight
                parameter.copy_(torch.from_numpy(values))
        return head

    def _read_features(self) -> LabelledFeatures:
        with giving_embeddings(self._state.model, self.output_layer):
            features = self._predict()
        return label_features(features, self._examples, self._text_model.task)


def label_features(
    features: NDArray[np.float32], examples: Examples, task: Task
) -> LabelledFeatures:
    """Return features, [rows, hidden], with the labels and weights of their examples."""
    labels, outputs = examples.labels, len(task.output_names)
    groups = task.strata(labels)
    return LabelledFeatures(features, labels, examples.weights, task.losses, outputs, groups)
