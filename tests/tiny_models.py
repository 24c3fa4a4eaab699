"""Small random encoders of each architecture, with a real tokenizer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from finetune.batch_finder.results import Case, architecture_of
from finetune.config.modes import Mode

VOCABULARY_SIZE = 300
COMMON_WORDS = (
    "the of in is a to what who how where when why which many much does do did was are name stand "
    "for first city country river mountain year long far old wrote invented author president color "
    "animal food word mean called people an and by you"
)
SIZES = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


BOUNDS = {"bos_token_id": 2, "eos_token_id": 3}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "distilbert": {
        "vocab_size": VOCABULARY_SIZE, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48,
        "max_position_embeddings": 64, "pad_token_id": 0,
    },
    "roberta": SIZES | BOUNDS,
    "electra": SIZES | {"embedding_size": 16},
    "deberta-v2": SIZES | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_buckets": 16, "conv_kernel_size": 3,
    },
    "modernbert": SIZES | BOUNDS | {
        "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3,
    },
    "xlm-roberta": SIZES | BOUNDS,
    "eurobert": SIZES | BOUNDS,
    "xlnet": {
        "vocab_size": VOCABULARY_SIZE, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48,
        "pad_token_id": 0,
    },
}  # fmt: skip


def tiny_config(architecture: str) -> PreTrainedConfig:
    """Return the configuration of an encoder with three layers of width 32."""
    return AutoConfig.for_model(architecture, **ARGUMENTS[architecture])


# The oldest transformers that can be installed doesn't know EuroBERT.
EUROBERT = ["eurobert"] if "eurobert" in CONFIG_MAPPING else []
ARCHITECTURES = ("bert", "distilbert", "roberta", "electra", "deberta-v2", "modernbert", *EUROBERT)


def tiny_model(architecture: str = "bert", *, classes: int = 6, **changes: Any) -> PreTrainedModel:
    """Return a reproducible random sequence classifier."""
    torch.manual_seed(0)
    config = tiny_config(architecture)
    config.update({"num_labels": classes, **changes})
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return model


def tiny_case(architecture: str = "bert", **changes: Any) -> Case:
    """Return a search case for a small encoder with all layers trained, with these changes."""
    case = Case(
        device="cpu", architecture=architecture_of(tiny_config(architecture).to_dict()), classes=6,
        mode=Mode("full"), padded_length=16, precision="fp32",
        gradient_checkpointing=False,
    )  # fmt: skip
    return replace(case, **changes)


def tiny_tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    """Return a lowercasing WordPiece tokenizer with the special tokens of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789?.,'-")
    vocabulary = [*special, *letters, *(f"##{letter}" for letter in letters), *COMMON_WORDS.split()]
    tokenizer = Tokenizer(
        models.WordPiece(
            {word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        padding_side=padding_side,
        model_input_names=["input_ids", "attention_mask"],
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


def save_tiny_model(folder: Path, architecture: str = "bert", **changes: Any) -> Path:
    """Save a small pretrained encoder and its tokenizer, and return the folder."""
    tiny_model(architecture, **changes).base_model.save_pretrained(folder)
    # XLNet reads the last token.
    tiny_tokenizer("left" if architecture == "xlnet" else "right").save_pretrained(folder)
    return folder
