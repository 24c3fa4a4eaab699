"""A model's shape without its weights: its config alone."""

from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from finetune.hub import fetch_tokenizer
from finetune.model.source import MINILM, find_model

# As published, so that they need no Hub. What is not given is BERT-base's.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "bert-base-uncased": {},
    "bert-large-uncased": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    MINILM: {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
}


def load_shape(name: str, *, revision: str | None) -> PreTrainedConfig:
    """Return a model's config; from the Hub, no weights are fetched for it.

    Args:
        name: A folder, a Hub id, or ``minilm``.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ConfigurationInvalid: If a revision is given for a folder.
        ModelNotFound: If there is no such folder or repository.
        ModelUnsupported: If no text classifier can be built from the config.
        HubNotReachable: If it is not in the cache and the Hub does not answer.
    """
    if name in _PUBLISHED and revision is None:
        return BertConfig(**_PUBLISHED[name])
    source = find_model(name, revision=revision, fetch=fetch_tokenizer)
    config = source.read_config()
    with source.failures_explained(), torch.device("meta"):
        AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    return config


def most_positions(shape: PreTrainedConfig) -> int | None:
    """Return the tokens of the longest text that a shape has positions for, None for any."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModel.from_config(  # type: ignore[no-untyped-call]
            shape, trust_remote_code=False
        )
    return count_positions(model)


def count_positions(model: PreTrainedModel) -> int | None:
    """Return the tokens of the longest text that a model has positions for, None for any."""
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return None
    # RoBERTa and its like count positions from behind the padding token's id.
    embeddings = getattr(model.base_model, "embeddings", None)
    padding_id = getattr(embeddings, "padding_idx", None)
    return positions if padding_id is None else positions - int(padding_id) - 1
