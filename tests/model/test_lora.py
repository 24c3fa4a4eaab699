"""LoRA adapters in a small encoder of each architecture."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_models import ARCHITECTURES, tiny_model
from torch import nn
from transformers import PreTrainedModel

from finetune.config.modes import Mode
from finetune.config.schema import Lora
from finetune.errors import ConfigurationError
from finetune.model.lora import Adapter, add_adapters
from finetune.model.structure import Structure, find_structure, freeze_parameters


def adapt(model: PreTrainedModel) -> Structure:
    """Add adapters to a model."""
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
def test_trained_adapters_can_be_merged_and_loaded_by_peft(
    architecture: str, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "xlnet"])
def test_attention_layers_get_adapters_if_they_are_linear(architecture: str) -> None:
    model, mode = tiny_model(architecture), Mode("lora")
    lora, structure = Lora(rank=2, alpha=4, dropout=0.0, targets="attention"), find_structure(model)
    if architecture == "xlnet":  # multiplies by plain parameters
        with pytest.raises(ConfigurationError, match="is called 'attention'") as raised:
            add_adapters(model, structure, lora, mode=mode)
        assert "ff.layer_1, ff.layer_2" in raised.value.remedy
    else:
        adapters = add_adapters(model, structure, lora, mode=mode).adapters
        assert adapters
        assert all("att" in name for name in adapters)
