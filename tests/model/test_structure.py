from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, SIZES, tiny_model
from tiny_training import random_examples
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    EuroBertConfig,
    FlaubertConfig,
    FunnelConfig,
    PreTrainedConfig,
    SqueezeBertConfig,
)

from finetune.errors import ModelUnsupportedError
from finetune.model.structure import find_structure

LAYERS = {
    "bert": "bert.encoder.layer.",
    "distilbert": "distilbert.transformer.layer.",
    "roberta": "roberta.encoder.layer.",
    "electra": "electra.encoder.layer.",
    "deberta-v2": "deberta.encoder.layer.",
    "modernbert": "model.layers.",
}
FINAL_NORM = {"modernbert": ("model.final_norm.",)}
HEAD = {
    "bert": ("bert.pooler.", "classifier."),
    "distilbert": ("pre_classifier.", "classifier."),
    "roberta": ("classifier.",),
    "electra": ("classifier.",),
    "deberta-v2": ("pooler.", "classifier."),
    "modernbert": ("head.", "classifier."),
}
CLASSIFIER = {"roberta": "classifier.out_proj.", "electra": "classifier.out_proj."}


def names_under(model: nn.Module, *prefixes: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(prefixes)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encoder_layers_head_and_output_layer_are_found(architecture: str) -> None:
    model = tiny_model(architecture)

    structure = find_structure(model)

    assert [set(layer) for layer in structure.layers] == [
        names_under(model, f"{LAYERS[architecture]}{number}.") for number in range(3)
    ]
    assert structure.head == names_under(model, *HEAD[architecture])
    assert structure.output_layer == names_under(model, CLASSIFIER.get(architecture, "classifier."))
    assert structure.new == structure.head - {
        f"bert.{name}" for name, _ in model.base_model.named_parameters()
    }
    above = FINAL_NORM.get(architecture)
    assert structure.final_norm == (names_under(model, *above) if above else set())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_size_of_what_the_output_layer_reads_is_found(architecture: str) -> None:
    model = tiny_model(architecture)

    structure = find_structure(model)

    assert 0.02 < structure.output_layer_input < 2
    [module] = {name.rpartition(".")[0] for name in structure.output_layer}
    read: list[torch.Tensor] = []
    model.get_submodule(module).register_forward_hook(lambda *call: read.append(call[1][0]))
    tokens = model.dummy_inputs["input_ids"][:2]
    model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    mean = sum(number**2 for number in read[0].flatten().tolist()) / read[0].numel()
    assert structure.output_layer_input == pytest.approx(mean**0.5, rel=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ready_mask_is_taken_where_it_means_the_same(architecture: str) -> None:
    model = tiny_model(architecture)

    takes_4d_mask = find_structure(model).takes_4d_mask

    assert takes_4d_mask == (architecture not in ("deberta-v2", "modernbert"))
    if takes_4d_mask:
        rows = np.arange(8)
        ready = random_examples(takes_4d_mask=True).inputs_of(rows, 14)
        usual = random_examples(takes_4d_mask=False).inputs_of(rows, 14)
        unmasked = {**usual, "attention_mask": torch.ones_like(usual["attention_mask"])}
        model.eval()
        expected = model(**usual).logits
        torch.testing.assert_close(model(**ready).logits, expected, rtol=0, atol=1e-6)
        assert (model(**unmasked).logits - expected).abs().max() > 1e-4


@pytest.mark.parametrize(
    "config",
    [
        EuroBertConfig(**SIZES, num_key_value_heads=4),
        FlaubertConfig(
            vocab_size=300, emb_dim=32, n_layers=1, n_heads=4, max_position_embeddings=64
        ),
    ],
    ids=["the mean of EuroBERT's tokens reads the mask too", "an assertion in FlauBERT's forward"],
)
def test_ready_mask_is_not_taken_where_the_model_fails_with_it(config: PreTrainedConfig) -> None:
    # As many as tokens in the texts that are tried: the shapes of EuroBERT's mean fit then.
    config.num_labels = 5
    model = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]

    assert not find_structure(model).takes_4d_mask


def test_a_search_leaves_parameters_hooks_and_random_numbers_as_they_were() -> None:
    model = tiny_model()
    torch.manual_seed(1)
    number = torch.rand(())

    torch.manual_seed(1)
    find_structure(model)

    assert torch.rand(()) == number
    assert not any(module._forward_hooks for module in model.modules())
    assert all(one.requires_grad and one.grad is None for one in model.parameters())


def test_model_without_a_linear_output_layer_is_refused() -> None:
    model = tiny_model()
    model.config.num_labels = 7

    with pytest.raises(ModelUnsupportedError, match="no output layer"):
        find_structure(model)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FunnelConfig, {"d_model": 32, "n_head": 4, "d_head": 8, "block_sizes": [1]}),
        (SqueezeBertConfig, {**SIZES, "embedding_size": 32}),
    ],
    ids=["layers in lists of lists", "layers that no hook sees"],
)
def test_model_of_another_build_is_refused_in_words(kind: Any, options: dict[str, Any]) -> None:
    model = AutoModelForSequenceClassification.from_config(kind(**options))  # type: ignore[no-untyped-call]

    with pytest.raises(ModelUnsupportedError, match="no encoder of layers"):
        find_structure(model)
