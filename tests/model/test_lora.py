"""Adapters in small encoders of each architecture: placement, splitting and merging."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_models import ARCHITECTURES, tiny_model
from torch import nn
from transformers import PreTrainedModel

from finetune.config.schema import Lora, Mode
from finetune.model.lora import Adapter, add_adapters
from finetune.model.structure import Structure, find_structure, freeze_parameters


def adapt(model: PreTrainedModel) -> Structure:
    """Add adapters to a model, with random values as if they were trained."""
    lora = Lora(rank=2, alpha=4, dropout=0.0, targets="auto")
    structure = add_adapters(model, find_structure(model), lora, mode=Mode("lora"))
    freeze_parameters(model, structure, mode=Mode("lora"))
    return structure


def logits_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(10).reshape(2, 5)
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(tokens, attention_mask=torch.ones_like(tokens)).logits
    return logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_has_trained_is_merged_and_loaded_by_peft(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    structure = adapt(model)
    with torch.no_grad():
        for name in structure.adapters | structure.output_layer:
            model.get_parameter(name).add_(0.1)

    adapter = Adapter.of(model, structure)

    merged = tiny_model(architecture)
    adapter.merge_into(merged)
    adapter.write(tmp_path, merged, structure.head, base="base", revision=None)
    loaded = PeftModel.from_pretrained(tiny_model(architecture), str(tmp_path))
    expected = logits_of(model)
    assert not torch.allclose(expected, logits_of(tiny_model(architecture)), atol=1e-2)
    assert torch.allclose(logits_of(merged), expected, atol=1e-5)
    assert torch.allclose(logits_of(loaded), expected, atol=1e-5)
    assert [*merged.state_dict()] == [*tiny_model(architecture).state_dict()]
