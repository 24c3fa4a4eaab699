"""Checks a model: which of its operators MPS lacks, and whether a device agrees with the CPU.

Operators are recorded in one step and one evaluation. Parameters are fake tensors, which have
shapes but no values. The batch is real, because a forward pass can depend on its values.
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from finetune.batch_finder.results import Case, architecture_of
from finetune.batch_finder.trial_model import prepare_trial_model
from finetune.config.modes import Mode
from finetune.config.schema import ModelConfig
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
from finetune.devices.select import check_precision, select_device
from finetune.events import Info, WarningMessage, emit
from finetune.files import SCHEMA_VERSION
from finetune.model.load import count_positions, load_model, loss_of, random_classifier
from finetune.model.mean_pooling import has_mean_layer
from finetune.model.structure import find_structure
from finetune.tasks.single import Single
from finetune.tokenization.encode import random_texts
from finetune.tokenization.examples import Examples, inputs_of_texts
from finetune.training.checks import Difference, compare_with_cpu
from finetune.training.precision import note_parity

CLASSES = 6
# Operators of PyTorch's tracer and profiler.
_NOT_FOR_DEVICES = ("prim", "profiler")
# CPU operators for which a GPU has its own version.
_NAMES_ON_MPS = {
    "aten::mkldnn_convolution": "aten::_mps_convolution",
    "aten::_slow_conv2d_forward": "aten::_mps_convolution",
    "aten::_slow_conv2d_backward.output_mask": "aten::mps_convolution_backward",
}
# Around the 8- and 32-token blocks of attention kernels.
_LENGTHS = (1, 8, 9, 31, 32, 33, 64)
_BATCH_SIZES = (1, 7, 32)
_TEXTS = 256
_GRADIENT_EXAMPLES = 8


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
    warnings: tuple[WarningMessage, ...]

    @property
    def missing(self) -> tuple[Operator, ...]:
        """The operators that MPS lacks."""
        return tuple(operator for operator in self.operators if operator.status == "missing")

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def audit_model(source: str, *, mode: Mode, precision: str, batch_size: int) -> OperatorReport:
    """Audit a model (folder, Hub ID or ``minilm``) on texts of the default maximum length."""
    model = random_classifier(source, classes=CLASSES, seed=0)
    longest = min(ModelConfig.max_length, count_positions(model) or ModelConfig.max_length)
    case = case_of(model, CpuDevice(), mode=mode, precision=precision, padded_length=longest)
    return audit_classifier(model, case, batch_size=batch_size)


def audit_classifier(model: PreTrainedModel, case: Case, *, batch_size: int) -> OperatorReport:
    """Audit one step and one evaluation batch of a model, without changing it.

    fp16 is recorded as bf16, which dispatches the same operators.
    """
    with FakeCopyMode(FakeTensorMode(allow_non_fake_inputs=True)):
        fake = copy.deepcopy(model)
    case = replace(case, precision=case.precision.replace("fp16", "bf16"))
    trial = prepare_trial_model(case, fake, find_structure(model), device=CpuDevice())
    recorder, optimizer = _Recorder(fake), trial.trainer.optimizer
    optimizer.register_step_pre_hook(lambda *_: setattr(recorder, "outside", "optimizer"))
    optimizer.register_step_post_hook(lambda *_: setattr(recorder, "outside", "loss"))
    trial.begin()
    with sdpa_kernel(SDPBackend.MATH), recorder:
        trial.take_step(batch_size=batch_size)
        recorder.begin_evaluation(fake)
        trial.evaluate(batch_size=batch_size)
    return recorder.report()


def case_of(
    model: PreTrainedModel, device: Device, *, mode: Mode, precision: str, padded_length: int
) -> Case:
    """Describe a step of a model on a device as a ``Case``."""
    classes = cast(int, model.config.num_labels)
    architecture = architecture_of(model.config.to_dict())
    return Case(device.name, architecture, classes, mode, padded_length, precision)


def audit_module(module: nn.Module, batch: Mapping[str, object]) -> OperatorReport:
    """Audit the forward and backward pass of any module. ``batch`` contains its arguments."""
    recorder = _Recorder(module)
    with sdpa_kernel(SDPBackend.MATH), recorder:
        loss = loss_of(module(**batch))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return recorder.report()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator dispatched after a model's forward pass starts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside = "loss"
        self._running: list[str] = []
        self._is_recording = False
        self._is_step = True
        self._calls: Counter[str] = Counter()
        self._modules: defaultdict[str, set[str]] = defaultdict(set)
        # The first operator per location with a tensor that MPS can't store.
        self._not_held: dict[str, str] = {}
        for name, module in model.named_modules():
            # All layers share one name.
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
            # Zeros on pages that are never written use no memory.
            output.logits = torch.zeros(output.logits.shape, dtype=output.logits.dtype)
            self._is_recording = True

        model.register_forward_hook(replace_logits)

    def report(self) -> OperatorReport:
        operators = tuple(
            Operator(name, status_of(name), self._calls[name], tuple(sorted(modules)))
            for name, modules in sorted(self._modules.items())
        )
        report = OperatorReport(operators, ())
        warnings = [
            WarningMessage(
                f"MPS has no {operator.name}, which {', '.join(operator.modules)} calls",
                remedy="replace its callers, or set PYTORCH_ENABLE_MPS_FALLBACK=1, which "
                "runs it on the CPU, slowly",
            )
            for operator in report.missing
        ]
        warnings += [
            WarningMessage(
                f"{place} passes float64 to {name}, which MPS doesn't support",
                remedy="convert it to float32",
            )
            for place, name in self._not_held.items()
        ]
        return replace(report, warnings=tuple(warnings))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = func.name()
        name = _NAMES_ON_MPS.get(name, name)
        if not self._is_recording or func.namespace in _NOT_FOR_DEVICES:
            return func(*args, **kwargs)
        # In training, such composites are decomposed before a mode sees them.
        if status_of(name) == "composite":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        place = self._place()
        self._calls[name] += self._is_step
        self._modules[name].add(place)
        result = func(*args, **kwargs)
        # Before clipping, GradScaler inverts its scale in float64, except on MPS.
        is_forward = place != "clipping" and current_autograd_node() is None
        if is_forward and any(map(_is_not_held, tree_iter((args, kwargs, result)))):
            self._not_held.setdefault(place, name)
        return result

    def _place(self) -> str:
        if node := current_autograd_node():
            self.outside = "clipping"
            return node.name()
        return self._running[-1] if self._running else self.outside


def _is_not_held(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128)


@dataclass(frozen=True)
class ParityReport:
    """Differences between a device and the CPU in fp32."""

    device: str
    precision: str
    differences: tuple[Difference, ...]

    @property
    def failures(self) -> tuple[Difference, ...]:
        """The differences that are too large."""
        return tuple(difference for difference in self.differences if not difference.passes)

    def worst_by_part(self) -> dict[str, Difference]:
        """Return the worst difference per part."""
        ascending = sorted(self.differences, key=lambda difference: difference.error)
        worst = {difference.part: difference for difference in ascending}
        return {part: worst[part] for part in dict.fromkeys(each.part for each in self.differences)}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, with null for infinity."""
        return {
            "schema_version": SCHEMA_VERSION,
            "device": self.device,
            "precision": self.precision,
            "passes": not self.failures,
            "differences": [
                asdict(difference)
                | {"error": difference.error if math.isfinite(difference.error) else None}
                for difference in self.differences
            ],
        }


def check_parity(
    device: str, *, model: str | None, mode: Mode, precision: str, batch_size: int
) -> ParityReport:
    """Compare a device with the CPU, and store the result for ``--precision auto``."""
    there = select_device(device)
    check_precision(there, precision)
    if model is None:
        classifier = random_classifier(ModelConfig.model, classes=CLASSES, seed=0)
    else:
        torch.manual_seed(0)
        task = Single([str(number) for number in range(CLASSES)])
        loaded = load_model(model, revision=None, task=task, from_scratch=False)
        classifier = loaded.model
    emit(Info(f"comparing {there.name} ({there.description}) in {precision} with the CPU in fp32"))
    report = compare_model(
        classifier, there, mode=mode, precision=precision, max_batch_size=batch_size
    )
    subject = f"{model or ModelConfig.model}, {mode}"
    note_parity(there, precision=precision, subject=subject, passes=not report.failures)
    return report


def compare_model(
    model: PreTrainedModel, device: Device, *, mode: Mode, precision: str, max_batch_size: int
) -> ParityReport:
    """Compare logits and gradients on a device and on the CPU. Move the model to the device."""
    structure = find_structure(model, has_mean_layer=has_mean_layer(model))
    # Stored transposed, as loaded weights may be.
    for parameter in map(model.get_parameter, structure.layers[-1]):
        if parameter.ndim == 2:
            parameter.data = parameter.detach().T.contiguous().T
    longest = min(_LENGTHS[-1], count_positions(model) or _LENGTHS[-1])
    device.choose_attention(longest_tokens=longest)
    config = model.config
    texts = random_texts(
        np.arange(_TEXTS) % longest + 1,
        vocabulary_size=config.vocab_size,
        padding_id=config.pad_token_id or 0,
        seed=0,
    )
    inputs = inputs_of_texts(texts, takes_4d_mask=structure.takes_4d_mask)
    labels = np.random.default_rng(0).integers(CLASSES, size=_TEXTS)
    examples = Examples(inputs.inputs_of, inputs.lengths, labels, np.ones(_TEXTS, np.float32))
    case = case_of(model, device, mode=mode, precision=precision, padded_length=longest)
    trainer = prepare_trial_model(case, model, structure, device=device).trainer
    lengths = sorted({min(device.shapes.padded_length(tokens), longest) for tokens in _LENGTHS})
    sizes = sorted({*(min(size, max_batch_size) for size in _BATCH_SIZES), max_batch_size})
    shapes = [(size, length) for length, size in product(lengths, sizes)]
    differences = compare_with_cpu(trainer, examples, [*shapes, (_GRADIENT_EXAMPLES, longest)])
    return ParityReport(device.name, precision, tuple(differences))
