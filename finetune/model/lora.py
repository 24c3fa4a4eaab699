"""LoRA with peft: small trainable matrices next to frozen linear layers, saved as an adapter.

A module with an adapter keeps its name, and its weight becomes ``base_layer.weight``.
"""

import copy
import importlib.util
import re
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from finetune.config.modes import Mode
from finetune.config.schema import Lora
from finetune.errors import ConfigurationError, ModelUnsupportedError, UsageError
from finetune.model.structure import Structure, encoder_layers, layers_of

# Importing peft takes half a second, and only these runs need it.
if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# The adapter name in peft, which its files omit, and the prefix of names in its files.
_NAME, _PREFIX = "default", "base_model.model."


def is_installed() -> bool:
    """Return whether peft is installed, without importing it."""
    return importlib.util.find_spec("peft") is not None


def require_peft() -> None:
    """Raise ``UsageError`` if peft is missing."""
    if not is_installed():
        raise UsageError("LoRA needs peft", remedy="pip install peft")


def add_adapters(
    model: PreTrainedModel, structure: Structure, lora: Lora, *, mode: Mode
) -> Structure:
    """Add adapters to the layers of a model in place. Return its structure with their names."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    if lora.rank > model.config.hidden_size:
        message = f"--lora-rank {lora.rank} is above the hidden size, {model.config.hidden_size}"
        raise ConfigurationError(message, remedy="lower it, such as to 8")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_find_targets(model, structure, lora.targets, mode=mode),
    )
    with warnings.catch_warnings(action="ignore"):
        inject_adapter_in_model(config, model)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            # Let autocast choose the precision. Otherwise peft would first convert inputs to fp32.
            module.cast_input_dtype_enabled = False
    names = {parameter: name for name, parameter in model.named_parameters()}
    layers = tuple(
        frozenset(names[parameter] for parameter in layer.parameters())
        for layer in encoder_layers(model)[: len(structure.layers)]
    )
    adapters = frozenset(name for name in names.values() if f".{_NAME}." in name)
    return replace(structure, layers=layers, adapters=adapters)


def _find_targets(
    model: PreTrainedModel, structure: Structure, targets: str, *, mode: Mode
) -> list[str]:
    """Return the names of the linear modules to adapt."""
    weights = frozenset[str]().union(*layers_of(structure, mode=mode))
    modules = model.named_modules()
    linear = [name for name, module in modules if isinstance(module, nn.Linear)]
    linear = [name for name in linear if f"{name}.weight" in weights]
    if not linear:
        raise ModelUnsupportedError(
            f"the layers of {type(model).__name__} have no linear modules to adapt",
            remedy="drop --lora-rank, or choose another model",
        )
    if targets in ("auto", "all-linear"):
        return linear
    words = [word.strip() for word in targets.split(",")]
    chosen = {word: [name for name in linear if f".{name}".endswith(f".{word}")] for word in words}
    if targets == "attention":
        chosen = {targets: [name for name in linear if "att" in name]}
    if missing := [word for word, names in chosen.items() if not names]:
        # The name of a module within its layer, as in layer.3.attention.self.query.
        inner = dict.fromkeys(re.split(r"\.\d+\.", name)[-1] for name in linear)
        raise ConfigurationError(
            f"--lora-targets: no linear module of a layer is called {missing[0]!r}",
            remedy=f"choose from: {', '.join(inner)}",
        )
    return [name for name in linear if any(name in names for names in chosen.values())]


@dataclass(frozen=True)
class Adapter:
    """The trained parameters and the head, in fp32 on the CPU, with peft's names."""

    config: "LoraConfig"
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, structure: Structure) -> "Adapter":
        """Extract the adapter of a model in training."""
        head = []
        for name, module in model.named_modules():
            inside = {parameter for parameter, _ in module.named_parameters(prefix=name)}
            if inside and inside <= structure.head:
                head.append(name)
        highest = [name for name in head if name.rpartition(".")[0] not in head]
        peft_config: Any = model.peft_config
        config = replace(
            peft_config[_NAME], task_type="SEQ_CLS", modules_to_save=highest, inference_mode=True
        )
        return cls(config, _adapter_tensors(model, structure.adapters | structure.head))

    def merge_into(self, model: PreTrainedModel) -> None:
        """Add the adapter to the weights of a pretrained model on the CPU, in place."""
        from peft import get_peft_model, set_peft_model_state_dict

        with warnings.catch_warnings(action="ignore"):
            # peft modifies its configuration argument.
            adapted = get_peft_model(model, copy.deepcopy(self.config))
            set_peft_model_state_dict(adapted, dict(self.tensors))
            adapted.merge_and_unload()

    def write(
        self, folder: Path, model: nn.Module, head: Set[str], *, base: str, revision: str | None
    ) -> None:
        """Write the adapter of a base model in peft's format, with the head of ``model``."""
        tensors = {**self.tensors, **_adapter_tensors(model, head)}
        (folder / ADAPTER_WEIGHTS).write_bytes(save(tensors))
        config = replace(self.config, base_model_name_or_path=base, revision=revision)
        config.save_pretrained(str(folder))


def _adapter_tensors(model: nn.Module, names: Set[str]) -> dict[str, torch.Tensor]:
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if name in names
    }
