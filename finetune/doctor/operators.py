"""Records the operators of a step and an evaluation, and checks which of them MPS supports.

The parameters are fake tensors, which have shapes and no values. The batch is real, because a
forward may depend on its values.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from finetune import events
from finetune.batch_finder.results import Case, architecture_of
from finetune.batch_finder.trial_model import prepare_trial_model
from finetune.config.schema import Mode, ModelConfig
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.facts import Status, status_of
from finetune.devices.private import (
    FakeCopyMode,
    FakeTensorMode,
    TorchDispatchMode,
    current_autograd_node,
    tree_iter,
)
from finetune.model.load import count_positions, loss_of, random_classifier
from finetune.model.structure import find_structure

CLASSES = 6
# Operators of PyTorch's tracer and its profiler.
_NOT_FOR_DEVICES = ("prim", "profiler")
# Operators of the CPU for which a GPU has its own version.
_NAMES_ON_MPS = {
    "aten::mkldnn_convolution": "aten::_mps_convolution",
    "aten::_slow_conv2d_forward": "aten::_mps_convolution",
    "aten::_slow_conv2d_backward.output_mask": "aten::mps_convolution_backward",
}


@dataclass(frozen=True)
class Operator:
    """An operator, such as ``aten::addmm``, and how MPS runs it.

    ``calls`` counts one step. ``modules`` lists the callers: names of modules with ``*`` for
    numbers, nodes of the backward pass, ``loss``, ``clipping``, ``optimizer`` or ``evaluation``.
    """

    name: str
    status: Status
    calls: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class OperatorReport:
    """The operators of a model, and warnings about operators and dtypes that MPS lacks."""

    operators: tuple[Operator, ...]
    warnings: tuple[events.WarningMessage, ...]

    @property
    def missing(self) -> tuple[Operator, ...]:
        """The operators that MPS does not have."""
        return tuple(operator for operator in self.operators if operator.status == "missing")

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"schema_version": 1, **asdict(self)}


def audit_model(source: str, *, mode: Mode, precision: str, batch_size: int) -> OperatorReport:
    """Audit a model (folder, Hub ID or ``minilm``) on texts of the maximum length of a run."""
    model = random_classifier(source, classes=CLASSES, seed=0)
    padded_length = min(ModelConfig.max_length, count_positions(model) or ModelConfig.max_length)
    return audit_classifier(
        model, mode=mode, precision=precision, batch_size=batch_size, padded_length=padded_length
    )


def audit_classifier(
    model: PreTrainedModel, *, mode: Mode, precision: str, batch_size: int, padded_length: int
) -> OperatorReport:
    """Audit a step and one evaluation batch of a model, which stays as it was.

    fp16 is recorded as bf16, which dispatches the same operators.
    """
    with FakeCopyMode(FakeTensorMode(allow_non_fake_inputs=True)):
        fake = copy.deepcopy(model)
    device = CpuDevice()
    case = case_of(
        model,
        device=device,
        mode=mode,
        precision=precision.replace("fp16", "bf16"),
        padded_length=padded_length,
    )
    trial = prepare_trial_model(case, fake, find_structure(model), device=device)
    recorder = _Recorder(fake)
    optimizer = trial.trainer.optimizer
    optimizer.register_step_pre_hook(lambda *_: setattr(recorder, "outside", "optimizer"))
    optimizer.register_step_post_hook(lambda *_: setattr(recorder, "outside", "loss"))
    trial.begin()
    with sdpa_kernel(SDPBackend.MATH), recorder:
        trial.take_step(batch_size=batch_size)
        recorder.begin_evaluation(fake)
        trial.evaluate(batch_size=batch_size)
    return recorder.report()


def case_of(
    model: PreTrainedModel, *, device: Device, mode: Mode, precision: str, padded_length: int
) -> Case:
    """Return the case of a step of a model on a device."""
    classes = cast(int, model.config.num_labels)
    architecture = architecture_of(model.config.to_dict())
    return Case(device.name, architecture, classes, mode, padded_length, precision)


def audit_module(module: nn.Module, batch: Mapping[str, object]) -> OperatorReport:
    """Audit the forward and backward of any module. ``batch`` has the arguments of the forward."""
    recorder = _Recorder(module)
    with sdpa_kernel(SDPBackend.MATH), recorder:
        loss = loss_of(module(**batch))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return recorder.report()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that is dispatched after the forward of a model starts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside = "loss"
        self._running: list[str] = []
        self._is_recording = False
        self._is_step = True
        self._calls: Counter[str] = Counter()
        self._modules: defaultdict[str, set[str]] = defaultdict(set)
        # The first operator per place with a tensor that MPS can't store.
        self._not_held: dict[str, str] = {}
        for name, module in model.named_modules():
            # All layers share a name.
            starred = ".".join("*" if part.isdigit() else part for part in name.split("."))
            self._watch(module, starred or type(model).__name__)

    def _watch(self, module: nn.Module, place: str) -> None:
        def enter(*_: object) -> None:
            self._is_recording = True
            self._running.append(place)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True)

    def begin_evaluation(self, model: nn.Module) -> None:
        """Stop counting, and make the model return real zeros, whose values can be read."""
        self._is_recording = self._is_step = False
        self.outside = "evaluation"

        def replace_logits(_: nn.Module, __: Any, output: Any) -> None:
            self._is_recording = False
            output.logits = _zeros_like(output.logits)
            self._is_recording = True

        model.register_forward_hook(replace_logits)

    def report(self) -> OperatorReport:
        operators = tuple(
            Operator(name, status_of(name), self._calls[name], tuple(sorted(modules)))
            for name, modules in sorted(self._modules.items())
        )
        return OperatorReport(operators, tuple(self._warnings(operators)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = func.name()
        name = _NAMES_ON_MPS.get(name, name)
        if not self._is_recording or func.namespace in _NOT_FOR_DEVICES:
            return func(*args, **kwargs)
        # In training, such a composite is decomposed before a mode sees it.
        if status_of(name) == "composite":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        place = self._place()
        self._calls[name] += self._is_step
        self._modules[name].add(place)
        result = func(*args, **kwargs)
        # Before clipping, GradScaler inverts its scale, in float64 everywhere but on MPS.
        is_forward = place != "clipping" and current_autograd_node() is None
        if is_forward and any(map(_is_not_held, tree_iter((args, kwargs, result)))):
            self._not_held.setdefault(place, name)
        return result

    def _place(self) -> str:
        if node := current_autograd_node():
            self.outside = "clipping"
            return node.name()
        return self._running[-1] if self._running else self.outside

    def _warnings(self, operators: tuple[Operator, ...]) -> Iterator[events.WarningMessage]:
        for operator in operators:
            if operator.status == "missing":
                yield events.WarningMessage(
                    f"MPS has no {operator.name}, which {', '.join(operator.modules)} calls",
                    remedy="replace what calls it, or set PYTORCH_ENABLE_MPS_FALLBACK=1, which "
                    "runs it on the CPU, slowly",
                )
        for place, name in self._not_held.items():
            yield events.WarningMessage(
                f"{place} passes float64 to {name}, which MPS doesn't support",
                remedy="convert it to float32",
            )


def _is_not_held(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    # Zeros on pages that are never written to use no memory.
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
