"""The part of a model below everything that trains, cut off so that it need run only once.

Nothing in it changes during a run, so what it gives for a text is the same at every update. The cut
is found by watching a forward, and kept only if a text's states at it do not depend on how far the
text is padded, and if what lies above it, given the states, learns as the whole model does.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from finetune.model.freeze import set_training
from finetune.tokenization.collate import prepare_mask

Inputs = Mapping[str, torch.Tensor]

# Tokens that the check of a cut pads its texts by a second time.
MORE_PADDING = 2


@dataclass(frozen=True)
class FeatureExtractor:
    """A model cut in two at the input of one of its modules.

    Args:
        model: The whole model.
        cut: Name of the module whose input is kept: the first that trains or, where the head reads
            one vector a text, the one that reads it.
        keeps_tokens: Whether the states are those of every token, or one vector a text.
        suffix: A model over the same parameters that takes the states as ``inputs_embeds``.
    """

    model: PreTrainedModel
    cut: str
    keeps_tokens: bool
    suffix: nn.Module

    def states(self, inputs: Inputs) -> torch.Tensor:
        """Run the model up to the cut, without dropout or graph.

        Args:
            inputs: Of the whole model, on its device: [rows, tokens].

        Returns:
            Floats of shape [rows, tokens, hidden], or [rows, hidden] where one vector is read.
        """
        self.model.train(False)
        handle = self.model.get_submodule(self.cut).register_forward_pre_hook(
            _stop, with_kwargs=True
        )
        try:
            with torch.no_grad():
                self.model(**inputs)
        except _Reached as reached:
            return reached.states
        finally:
            handle.remove()
        raise RuntimeError(f"the forward did not come to {self.cut}")

    def frozen_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the states depend on besides the inputs, by name."""
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                yield name, parameter.detach()
        yield from self.model.named_buffers()


def split_frozen(
    model: PreTrainedModel, *, takes_4d_mask: bool, pads_left: bool
) -> FeatureExtractor | None:
    """Cut a model below what trains; return None where nothing is frozen or no cut does.

    Args:
        model: On the CPU, frozen as the mode says.
        takes_4d_mask: Whether attention takes a mask of shape [rows, 1, 1, tokens].
        pads_left: Whether padding stands in front of a text.
    """
    mask, inputs = _make_up_texts(model, takes_4d_mask=takes_4d_mask, pads_left=pads_left)
    _, wider_inputs = _make_up_texts(
        model, takes_4d_mask=takes_4d_mask, pads_left=pads_left, padding=MORE_PADDING
    )
    model.train(False)
    calls = _record_calls(model, inputs)
    for cut in _possible_cuts(calls):
        keeps_tokens = calls[cut].states.ndim == 3
        prefix = FeatureExtractor(model, cut, keeps_tokens, _make_suffix(model, calls, cut))
        states, wider_states = prefix.states(inputs), prefix.states(wider_inputs)
        if keeps_tokens:
            # What padding becomes is not kept, so that nothing may depend on it.
            kept = slice(MORE_PADDING, None) if pads_left else slice(-MORE_PADDING)
            states, wider_states = (
                one * mask[..., None] for one in (states, wider_states[:, kept])
            )
            above = {"inputs_embeds": states, "attention_mask": inputs["attention_mask"]}
        else:
            above = pooled_inputs(states, takes_4d_mask=takes_4d_mask)
        if _are_close(states, wider_states) and _learn_alike(model, inputs, prefix.suffix, above):
            return prefix
    return None


def _make_up_texts(
    model: PreTrainedModel, *, takes_4d_mask: bool, pads_left: bool, padding: int = 0
) -> tuple[torch.Tensor, Inputs]:
    """Return the mask, bool of shape [rows, tokens], and the inputs of two texts."""
    tokens = model.dummy_inputs["input_ids"][:2]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, slice(2) if pads_left else slice(3, None)] = False
    sides = (padding, 0) if pads_left else (0, padding)
    tokens = nn.functional.pad(tokens, sides, value=model.config.pad_token_id or 0)
    mask = nn.functional.pad(mask, sides)
    tensors = {"input_ids": tokens, "attention_mask": mask}
    return mask, prepare_mask(tensors, takes_4d_mask=takes_4d_mask)


def pooled_inputs(states: torch.Tensor, *, takes_4d_mask: bool) -> dict[str, torch.Tensor]:
    """Return what a suffix takes where one vector a text is kept: texts of one token.

    Args:
        states: Of shape [rows, hidden].
        takes_4d_mask: Whether attention takes a mask of shape [rows, 1, 1, tokens].
    """
    mask = torch.ones(len(states), 1, dtype=torch.bool, device=states.device)
    return prepare_mask(
        {"inputs_embeds": states[:, None], "attention_mask": mask}, takes_4d_mask=takes_4d_mask
    )


class _Reached(Exception):
    """Carries the states out of a forward that need not go on."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


def _stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    states = _states_in((*args, *kwargs.values()))
    if states is None:
        raise RuntimeError("the module at the cut was called without states")
    raise _Reached(states)


@dataclass(frozen=True)
class _Call:
    """How a module was first called: the states that came in, if any, and what it returned."""

    module: nn.Module
    states: torch.Tensor
    output: Any


def _record_calls(model: nn.Module, inputs: Inputs) -> dict[str, _Call]:
    """Run a model; return the calls of its modules in the order in which they began."""
    names = {module: name for name, module in model.named_modules()}
    rows = len(next(iter(inputs.values())))
    received: dict[str, torch.Tensor | None] = {}
    returned: dict[str, Any] = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received.setdefault(names[module], _states_in((*args, *kwargs.values())))

    def end(module: nn.Module, _: Any, output: Any) -> None:
        returned.setdefault(names[module], output)

    hooks = [
        hook
        for module in names
        for hook in (
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end),
        )
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    modules = {name: module for module, name in names.items()}
    nothing = torch.empty(rows)
    return {
        name: _Call(modules[name], nothing if states is None else states, returned[name])
        for name, states in received.items()
    }


def _states_in(values: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the first of some arguments that can be states: floats with 2 or 3 dimensions."""
    return next((value for value in values if _are_states(value)), None)


def _are_states(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.is_floating_point() and value.ndim in (2, 3)


def _possible_cuts(calls: Mapping[str, _Call]) -> list[str]:
    """Return the modules at whose input a model may be cut, the highest first."""
    rows = len(next(iter(calls.values())).output[0])
    with_states = {
        name: call
        for name, call in calls.items()
        if call.states.ndim > 1 and len(call.states) == rows and list(call.module.parameters())
    }
    trained = [name for name, call in with_states.items() if _trains(call.module)]
    reads_vector = [name for name, call in with_states.items() if call.states.ndim == 2]
    trained_on_vector = [name for name in trained if name in reads_vector]
    # Each module once, though it may be found in two ways.
    return list(dict.fromkeys([*trained_on_vector[:1], *reads_vector[:1], *trained[:1]]))


def _trains(module: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in module.parameters())


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _make_suffix(model: nn.Module, calls: Mapping[str, _Call], cut: str) -> nn.Module:
    """Return a model over the same parameters in which what is frozen below the cut does nothing.

    The names of what trains stay, so that checkpoints do not depend on the cut.
    """
    tensors = [*model.parameters(), *model.buffers()]
    suffix = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    rows = len(calls[cut].states)
    for name in list(calls)[: list(calls).index(cut)]:
        call = calls[name]
        if _is_frozen(call.module) and _returns_states(call.output, rows):
            # Not the module itself: a model may look at what its layers have beside a forward.
            suffix.get_submodule(name).forward = partial(_pass_on, _form(call.output))
    return suffix


def _returns_states(output: Any, rows: int) -> bool:
    has_parts = isinstance(output, tuple | ModelOutput) and len(output) > 0
    first = output[0] if has_parts else output
    return _are_states(first) and len(first) == rows


def _form(output: Any) -> int | tuple[type, dict[Any, int]]:
    """Return an output's dimensions: a number for a tensor, else its type and one for each part."""
    if isinstance(output, torch.Tensor):
        return output.ndim
    parts = output.items() if isinstance(output, ModelOutput) else enumerate(output)
    return type(output), {name: part.ndim if _are_states(part) else 0 for name, part in parts}


def _pass_on(form: int | tuple[type, dict[Any, int]], *args: Any, **kwargs: Any) -> Any:
    """Return the states among a module's arguments in the form of what it would return."""
    states = _states_in((*args, *kwargs.values()))
    if states is None:
        raise TypeError("a module below the cut was called without states")
    by_dimensions = {2: states[:, 0] if states.ndim == 3 else states, 3: states}
    if isinstance(form, int):
        return by_dimensions[form]
    kind, dimensions = form
    parts = {name: by_dimensions.get(number) for name, number in dimensions.items()}
    return kind(**parts) if issubclass(kind, ModelOutput) else tuple(parts.values())


def _learn_alike(model: nn.Module, inputs: Inputs, suffix: nn.Module, above: Inputs) -> bool:
    """Compare logits and gradients of two models over the same parameters, with dropout."""
    expected = _learn(model, inputs)
    try:
        actual = _learn(suffix, above)
    # What a model says of inputs that it was not made for.
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return all(_are_close(one, other) for one, other in zip(expected, actual, strict=True))


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    # What large numbers lose by rounding, small ones beside them have lost too.
    rounding = 1e-6 * other.abs().max().item()
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5 + rounding)


def _learn(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Return the logits and the gradient of each parameter that trains, in the order of names."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    set_training(model)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        # Not torch.manual_seed, after which every seed would bring the same dropout on a GPU.
        torch.default_generator.manual_seed(0)
        logits = model(**inputs).logits
        gradients = torch.autograd.grad(
            # A classifier may stand at zero; then logits alone would have no gradient.
            (logits + 1).square().sum(),
            [trained[name] for name in sorted(trained)],
            materialize_grads=True,
        )
    return [logits.detach(), *gradients]
