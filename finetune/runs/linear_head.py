"""Fits the linear head of a run on the features of its training rows."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.evaluation.predict import Predictor
from finetune.events import Info, emit
from finetune.model.load import TextModel
from finetune.runs.prepare import RunInputs
from finetune.runs.results import UnlabeledTexts
from finetune.tokenization.examples import Examples
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    MAX_TEXTS,
    MIN_FITTING_NAMES,
    LabelledFeatures,
    LinearHead,
    choose_inverse_regularization,
    cross_validate,
    fit_linear_head,
    fit_with_texts,
    names_fit,
)
from finetune.training.plan import Plan, bypass_output_layer, interpolate, trained_share
from finetune.training.trainer import Trainer


class LinearHeadFitter:
    """Fits the output layer of a model in training.

    ``cross_validated`` holds the logits of the training rows on the frozen encoder, each row
    predicted by a head fitted without it. It is None if validation rows measure the model.
    """

    def __init__(self, inputs: RunInputs, trainer: Trainer) -> None:
        self._inputs, self._trainer = inputs, trainer
        is_contrastive, seed = inputs.method.is_contrastive, trainer.plan.seed
        rows = self._read_features("train")
        self._inverse_regularization, logits = DEFAULT_INVERSE_REGULARIZATION, None
        if not is_contrastive:
            self._inverse_regularization, logits = choose_inverse_regularization(rows, seed=seed)
        # This happens before contrastive training, after which the encoder has seen all labels.
        self.cross_validated: NDArray[np.float32] | None = None
        if is_contrastive or "validation" not in inputs.examples:
            if logits is None:
                logits = cross_validate(rows, [self._inverse_regularization], seed=seed)[
                    self._inverse_regularization
                ]
            self.cross_validated = logits
        self.unlabeled: UnlabeledTexts | None = None
        self.names = self._add_names(rows) if "names" in trainer.examples else ""
        # Contrastive training changes the features; the pretrained weights are kept to interpolate.
        self._rows = None if is_contrastive else rows
        self._embeddings = ExitStack()
        self._pretrained = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in trainer.trained_parameters().items()
            if is_contrastive
        }

    def _read_features(self, split: str) -> LabelledFeatures:
        trainer = self._trainer
        return read_features(self._inputs, trainer.plan, trainer.predictor, trainer.examples[split])

    def _add_names(self, rows: LabelledFeatures) -> str:
        """Add names of classes to the training rows if they fit, and return a sentence.

        Descriptions are always added: users write them for this purpose, and they help even where
        few fit (docs/measurements.md).
        """
        names, examples = self._read_features("names"), self._trainer.examples
        fit = names_fit(names.features, rows.features, rows.labels[:, None] == names.labels)
        has_descriptions = self._inputs.config.data.class_descriptions is not None
        word = "descriptions" if has_descriptions else "names"
        similar = f"{fit.sum()} of {len(fit)} are most similar to the texts of their class"
        if has_descriptions or fit.mean() >= MIN_FITTING_NAMES:
            train = examples["train"].followed_by(examples["names"])
            self._trainer.examples = {**examples, "train": train}
            sentence = f"{word} of classes are training rows: {similar}"
        else:
            remedy = "--class-descriptions describes them better"
            sentence = f"names of classes are not used: only {similar}; {remedy}"
        emit(Info(f"few-shot: {sentence}"))
        return sentence

    def start(self) -> None:
        """Make the model return embeddings until ``finish``, for contrastive training."""
        if self._rows is None:
            layer = output_layer(self._inputs.text_model)
            self._embeddings.enter_context(bypass_output_layer(self._trainer.model, layer))

    def finish(self) -> float:
        """Interpolate a contrastively trained encoder, then fit the head; return its loss."""
        self._embeddings.close()
        rows, text_model, texts = self._rows, self._inputs.text_model, None
        if rows is None:
            assert self.cross_validated is not None
            predicted = text_model.task.read_logits(self.cross_validated).predicted
            accuracy = float((predicted == self._inputs.examples["train"].labels).mean())
            interpolate(self._trainer.model, self._pretrained, share=trained_share(accuracy))
            rows = self._read_features("train")
            texts = self._read_unlabeled()
        if texts is None:
            head = fit_linear_head(rows, inverse_regularization=self._inverse_regularization)
        else:
            head = fit_with_texts(rows, texts)
            self._report_unlabeled(rows, texts, head)
        with torch.no_grad():
            for parameter in text_model.output_parameters:
                values = head.bias if parameter.ndim == 1 else head.weight
                parameter.copy_(torch.from_numpy(values))
        return head.loss

    def _read_unlabeled(self) -> NDArray[np.float32] | None:
        """Return the features of unlabeled texts, at most a fixed sample: [texts, hidden]."""
        table, options = self._inputs.data.unlabeled, self._inputs.config.model
        if table is None:
            return None
        if len(table) > MAX_TEXTS:
            table = table.take(
                np.random.default_rng(0).choice(len(table), MAX_TEXTS, replace=False)
            )
        text_model = self._inputs.text_model
        encoded = text_model.encode(
            *table.columns, max_length=options.max_length, stride=options.window_stride
        )
        shapes, layer = self._inputs.device.shapes, output_layer(text_model)
        # The model of the trainer may read stored features.
        predictor = replace(self._trainer.predictor, model=text_model.model)
        with bypass_output_layer(text_model.model, layer):
            return predictor.logits(
                text_model.inputs(encoded),
                padded_lengths=text_model.padded_lengths(encoded.lengths, shapes),
            )

    def _report_unlabeled(
        self, rows: LabelledFeatures, texts: NDArray[np.float32], head: LinearHead
    ) -> None:
        """Report the number of texts, and how many predictions on test rows they change."""
        features = self._read_features("test").features
        plain = (
            fit_linear_head(rows, inverse_regularization=self._inverse_regularization)
            .logits(features)
            .argmax(axis=1)
        )
        changed = float((plain != head.logits(features).argmax(axis=1)).mean())
        self.unlabeled = UnlabeledTexts(len(texts), changed)
        emit(Info(f"few-shot: {self.unlabeled.sentence}"))


def read_features(
    inputs: RunInputs, plan: Plan, predictor: Predictor, examples: Examples
) -> LabelledFeatures:
    """Return the inputs of the output layer for examples, with their labels and weights."""
    task, labels = inputs.task, examples.labels
    with bypass_output_layer(predictor.model, output_layer(inputs.text_model)):
        features = predictor.logits(examples, padded_lengths=plan.padded_lengths)
    outputs = len(task.output_names)
    return LabelledFeatures(
        features, labels, examples.weights, task.losses, outputs, task.strata(labels)
    )


def output_layer(text_model: TextModel) -> str:
    """Return the name of the module that computes the logits."""
    return next(iter(text_model.structure.output_layer)).rpartition(".")[0]
