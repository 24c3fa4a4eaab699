"""The rows of a split as the model sees them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import events
from finetune.events import Tell
from finetune.model.inputs import model_inputs
from finetune.model.load import Classifier
from finetune.pipeline.prepare import Prepared
from finetune.tokenization.collate import collate_rows
from finetune.tokenization.encode import EncodedTexts, encode_texts
from finetune.training.micro_batches import Examples, balanced_class_weights, row_weights

InputsOf = Callable[[NDArray[np.int64], int], dict[str, torch.Tensor]]


def encode_split(prepared: Prepared, split: str, *, class_weights: str, tell: Tell) -> Examples:
    """Encode a split's texts once, and weigh its rows.

    Args:
        prepared: The run.
        split: Name of the split.
        class_weights: ``none`` or ``balanced``.
        tell: Is told of texts that were cut.
    """
    rows = prepared.table[split]
    classifier = prepared.classifier
    encoded = encode_for(classifier, rows["text"], max_length=prepared.config.model.max_length)
    if encoded.cut_rows:
        tell(
            events.Warning(
                f"{encoded.cut_rows:,} of the {len(rows):,} {split} texts are longer than "
                f"{encoded.lengths.max()} tokens and lose their end",
                remedy="raise --max-length if the end matters",
            )
        )
    labels = np.asarray(rows["label"], np.int64)
    classes = rows.features["label"].num_classes
    weights = (
        balanced_class_weights(labels, classes=classes)
        if class_weights == "balanced"
        else np.ones(classes, np.float32)
    )
    return Examples(
        inputs_of=inputs_maker(encoded, classifier),
        lengths=encoded.lengths,
        labels=labels,
        weights=row_weights(labels, weights),
    )


def encode_for(classifier: Classifier, texts: Sequence[str], *, max_length: int) -> EncodedTexts:
    """Encode texts for a model, within its positions."""
    most_tokens = min(max_length, classifier.most_tokens)
    return encode_texts(classifier.tokenizer, list(texts), max_length=most_tokens)


def inputs_maker(encoded: EncodedTexts, classifier: Classifier) -> InputsOf:
    """Return the function that makes a model's inputs from numbers of rows and a width."""
    takes_4d_mask = classifier.structure.takes_4d_mask

    def inputs_of(rows: NDArray[np.int64], width: int) -> dict[str, torch.Tensor]:
        return model_inputs(collate_rows(encoded, rows, width=width), takes_4d_mask=takes_4d_mask)

    return inputs_of
