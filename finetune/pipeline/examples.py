"""The rows of a split as the model sees them."""

import numpy as np

from finetune import events
from finetune.events import Emit
from finetune.pipeline.prepare import Prepared
from finetune.tokenization.examples import Examples
from finetune.training.micro_batches import balanced_class_weights, row_weights


def encode_split(prepared: Prepared, split: str, *, emit: Emit) -> Examples:
    """Encode a split's texts once, and weigh its rows.

    Args:
        prepared: The run.
        split: Name of the split.
        emit: Is told of texts that were cut.
    """
    rows = prepared.table[split]
    classifier = prepared.classifier
    max_length = prepared.config.model.max_length
    encoded = classifier.encode(rows["text"], max_length=max_length)
    if encoded.truncated_texts:
        has_more = classifier.max_tokens > max_length
        emit(
            events.WarningMessage(
                f"{encoded.truncated_texts:,} of the {len(rows):,} {split} texts are longer than "
                f"{encoded.lengths.max()} tokens and lose their end",
                remedy="raise --max-length if the end matters"
                if has_more
                else "if the end matters, choose a model with more positions",
            )
        )
    labels = np.asarray(rows["label"], np.int64)
    classes = rows.features["label"].num_classes
    weights = (
        balanced_class_weights(labels, classes=classes)
        if prepared.config.training.class_weights == "balanced"
        else np.ones(classes, np.float32)
    )
    return Examples(
        inputs_of=classifier.inputs(encoded).inputs_of,
        lengths=encoded.lengths,
        labels=labels,
        weights=row_weights(labels, weights),
    )
