from typing import Any

import pytest
from tiny_models import ARCHITECTURES, SIZES, tiny_model
from torch import nn
from transformers import AutoModelForSequenceClassification, FunnelConfig, SqueezeBertConfig

from finetune.errors import ModelUnsupportedError
from finetune.model.structure import find_structure

LAYERS = {
    "bert": "bert.encoder.layer.",
    "distilbert": "distilbert.transformer.layer.",
    "roberta": "roberta.encoder.layer.",
    "electra": "electra.encoder.layer.",
    "deberta-v2": "deberta.encoder.layer.",
    "modernbert": "model.layers.",
    "eurobert": "model.layers.",
}
FINAL_NORM = {"modernbert": ("model.final_norm.",), "eurobert": ("model.norm.",)}
HEAD = {
    "bert": ("bert.pooler.", "classifier."),
    "distilbert": ("pre_classifier.", "classifier."),
    "roberta": ("classifier.",),
    "electra": ("classifier.",),
    "deberta-v2": ("pooler.", "classifier."),
    "modernbert": ("head.", "classifier."),
    "eurobert": ("dense.", "classifier."),
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

    with pytest.raises(ModelUnsupportedError, match="no encoder layers"):
        find_structure(model)
