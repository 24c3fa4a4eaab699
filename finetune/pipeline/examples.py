"""The rows of a split as the model sees them."""

import numpy as np

from finetune import events
from finetune.events import Tell
from finetune.pipeline.inputs import encode_for, inputs_maker
from finetune.pipeline.prepare import Prepared
from finetune.training.micro_batches import Examples, balanced_class_weights, row_weights


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
