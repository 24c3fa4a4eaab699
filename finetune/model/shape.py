"""A model's shape without its weights: its config alone."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, BertConfig, PreTrainedConfig, PreTrainedModel

from finetune.hub import fetch_tokenizer
from finetune.model.load import MINILM, count_positions, find_model

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


def load_shape(source: str, *, revision: str | None) -> PreTrainedConfig:
    """Return a model's config; from the Hub, no weights are fetched for it.

    Args:
        source: A folder, a Hub id, or ``minilm``.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ModelNotFound: If there is no such folder or repository.
        HubNotReachable: If it is not in the cache and the Hub does not answer.
    """
    if source in _PUBLISHED:
        return BertConfig(**_PUBLISHED[source])
    folder = find_model(source, revision=revision, fetch=fetch_tokenizer).folder
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return config


def most_positions(shape: PreTrainedConfig) -> int | None:
    """Return the tokens of the longest text that a shape has positions for, None for any."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModel.from_config(  # type: ignore[no-untyped-call]
            shape, trust_remote_code=False
        )
    return count_positions(model)
