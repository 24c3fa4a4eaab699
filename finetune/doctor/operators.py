"""Records what a step and an evaluation dispatch, and looks up how MPS would run each operator.

The parameters are fake tensors, which have shapes and no values. The batch is real, so that a
forward may depend on its values.
"""

import bisect
import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from transformers import PreTrainedModel

from finetune import events
from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.trial_model import prepare_trial_model
from finetune.config.mode import Mode
from finetune.config.schema import ModelConfig
from finetune.devices import host
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.emulation import dispatching_as_mps, name_on_mps, run_composite, run_on_cpu
from finetune.devices.mps.chips import generation
from finetune.devices.mps.known_faults import KnownFault, known_faults, named_arguments
from finetune.devices.mps.operators import Status, status_of
from finetune.model.factory import loss_of
from finetune.model.shape import count_positions, random_classifier
from finetune.model.structure import find_structure

# The release, whose faults are looked up.
_TORCH_VERSION = torch.__version__.partition("+")[0]
_NOT_HELD = (torch.float64, torch.complex128)
# Those of PyTorch's tracer and its profiler.
_NOT_FOR_DEVICES = ("prim", "profiler")
CLASSES = 6


@dataclass(frozen=True)
class Operator:
    """An operator, such as ``aten::addmm``, and how MPS runs it.

    The calls are those of one step, the modules what calls it, forward or backward: names with
    ``*`` for numbers, or ``loss``, ``clipping``, ``optimizer``, ``evaluation``.
    """

    name: str
    status: Status
    calls: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class OperatorReport:
    """A model's operators, and what MPS can't run, can't hold or is known to compute wrongly."""

    operators: tuple[Operator, ...]
    warnings: tuple[events.WarningMessage, ...]

    @property
    def missing(self) -> tuple[Operator, ...]:
        """The operators that MPS does not have."""
        return tuple(one for one in self.operators if one.status == "missing")

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"schema_version": 1, **asdict(self)}


def audit_model(source: str, *, mode: Mode, precision: str, batch_size: int) -> OperatorReport:
    """Audit a model of a folder, a Hub id or ``minilm``, with texts as long as a run takes them."""
    model = random_classifier(source, classes=CLASSES, seed=0)
    padded_length = min(ModelConfig.max_length, count_positions(model) or ModelConfig.max_length)
    return audit_classifier(
        model, mode=mode, precision=precision, batch_size=batch_size, padded_length=padded_length
    )


def audit_classifier(
    model: PreTrainedModel, *, mode: Mode, precision: str, batch_size: int, padded_length: int
) -> OperatorReport:
    """Audit a step of a model on the CPU, and one evaluation batch; it stays as it was.

    fp16 is recorded as bf16, which dispatches the same, with the scaling of the gradients around.
    """
    fake, device = _fake_copy(model), CpuDevice()
    dispatched = "bf16" if precision == "fp16" else precision
    case = case_of(
        model, device=device, mode=mode, precision=dispatched, padded_length=padded_length
    )
    trial = prepare_trial_model(case, fake, find_structure(model), device=device)
    recorder = _Recorder(fake)
    recorder.places.name_steps_of(trial.training_state.optimizer)
    if precision == "fp16":
        scaler = torch.amp.GradScaler("cpu")
        trial = replace(trial, training_state=replace(trial.training_state, scaler=scaler))
    trial.begin()
    with dispatching_as_mps(), recorder:
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
    """Compute and audit the forward and backward of any module, given the forward's arguments."""
    recorder = _Recorder(module)
    with dispatching_as_mps(), recorder:
        loss = loss_of(module(**batch))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return recorder.report()


def _fake_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model with fake parameters, whose gradients are clipped one by one, as on MPS."""
    with FakeCopyMode(FakeTensorMode(allow_non_fake_inputs=True)):
        return copy.deepcopy(model)


class _Places:
    """Knows which module is running, also in the backward: by the numbers of autograd's nodes."""

    def __init__(self, model: nn.Module) -> None:
        self.outside = "loss"
        self._running: list[str] = []
        # From which of the graph's nodes on the forward of which module continues.
        self._first_nodes: list[int] = []
        self._places: list[str] = []
        self._owners: dict[int, str] = {}
        for name, module in model.named_modules():
            # All layers share a name.
            starred = ".".join("*" if part.isdigit() else part for part in name.split("."))
            place = starred or type(model).__name__
            self._owners |= {id(one): place for one in module.parameters(recurse=False)}
            module.register_forward_pre_hook(partial(self._enter, place))
            module.register_forward_hook(self._leave, always_call=True)

    def now(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None:
            return self._running[-1] if self._running else self.outside
        self.outside = "clipping"
        # The node that adds up the gradients of a parameter.
        if hasattr(node, "variable"):
            return self._owners.get(id(node.variable), "loss")
        index = bisect.bisect_right(self._first_nodes, node._sequence_nr()) - 1
        return self._places[index]

    def name_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "outside", "optimizer"))
        optimizer.register_step_post_hook(lambda *_: setattr(self, "outside", "loss"))

    def _enter(self, place: str, *_: Any) -> None:
        self._running.append(place)
        self._note()

    def _leave(self, *_: Any) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        self._first_nodes.append(_get_sequence_nr())
        self._places.append(self._running[-1] if self._running else "loss")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that is dispatched once a model has begun its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = _Places(model)
        self._is_recording = False
        self._is_step = True
        self._calls: Counter[str] = Counter()
        self._modules: defaultdict[str, set[str]] = defaultdict(set)
        self._parts: dict[str, Counter[str]] = {}
        # What is given to MPS that it can't hold, or computes wrongly, and where.
        self._not_held: defaultdict[str, set[str]] = defaultdict(set)
        self._faults: defaultdict[tuple[str, KnownFault], set[str]] = defaultdict(set)
        self._known_faults = known_faults(
            torch_version=_TORCH_VERSION,
            macos=host.macos_version(),
            chip=generation(host.cpu_name()),
        )
        start = partial(setattr, self, "_is_recording", True)
        model.register_forward_pre_hook(lambda *_: start(), prepend=True)

    def begin_evaluation(self, model: nn.Module) -> None:
        """Count no more calls, and let the model return zeros, which can be read."""
        self._is_recording = self._is_step = False
        self.places.outside = "evaluation"

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

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_recording or func.namespace in _NOT_FOR_DEVICES:
            return run_on_cpu(func, *args, **kwargs)
        name = name_on_mps(func)
        # Before it reaches a device; in training, before a mode sees it.
        if status_of(name) == "composite" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        result = run_on_cpu(func, *args, **kwargs)
        place = self.places.now()
        if name not in self._parts:
            self._parts[name] = Counter({name: 1}) + _Parts().of(func, args, kwargs)
        for part, calls in self._parts[name].items():
            self._calls[part] += calls if self._is_step else 0
            self._modules[part].add(place)
        arguments = named_arguments(func, args, kwargs)
        # Before clipping GradScaler inverts its scale, in float64 everywhere but on MPS.
        if place != "clipping" and any(
            isinstance(one, torch.Tensor) and one.dtype in _NOT_HELD
            for one in tree_iter((list(arguments.values()), result))
        ):
            self._not_held[name].add(place)
        for fault in self._known_faults:
            if fault.hits(name, arguments):
                self._faults[name, fault].add(place)
        return result

    def _warnings(self, operators: tuple[Operator, ...]) -> Iterator[events.WarningMessage]:
        for operator in operators:
            if operator.status == "missing":
                yield events.WarningMessage(
                    f"MPS has no {operator.name}, which {', '.join(operator.modules)} calls",
                    remedy="replace what calls it, or set PYTORCH_ENABLE_MPS_FALLBACK=1, which "
                    "runs it on the CPU, slowly",
                )
        for name, places in self._not_held.items():
            yield events.WarningMessage(
                f"{', '.join(sorted(places))} gives float64 to {name}, and MPS can't hold float64",
                remedy="convert it to float32",
            )
        for (name, fault), places in self._faults.items():
            yield events.WarningMessage(
                f"in PyTorch {_TORCH_VERSION}, {name} on MPS {fault.effect}: "
                f"{', '.join(sorted(places))} ({fault.source})",
                remedy=fault.remedy,
            )


class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that a composite dispatches, down to those that are no composites."""

    def __init__(self, inside: frozenset[str] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        # The composites that are being decomposed: some call themselves.
        self._inside = inside

    def of(self, operator: torch._ops.OpOverload, args: Any, kwargs: Any) -> Counter[str]:
        """Return the parts of a composite, found by running it on zeros."""
        name = name_on_mps(operator)
        if status_of(name) != "composite" or name in self._inside:
            return Counter()
        args, kwargs = tree_map_only(torch.Tensor, _zeros_like, (args, kwargs))
        parts = _Parts(self._inside | {name})
        with parts:
            run_composite(operator, *args, **kwargs)
        return parts.calls

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls += Counter({name_on_mps(func): 1}) + self.of(func, args, kwargs)
        return run_on_cpu(func, *args, **kwargs)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    # On a new page of memory that is never written to, zeros take up none.
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
