"""How many operations a step of BERT-base dispatches on MPS, where each costs time of its own.

The hidden size is not BERT-base's: the number depends on the layers, each of which adds the same.
Views and allocations launch nothing and are not counted; an operator that MPS composes of others
counts as these.
"""

from collections import Counter
from typing import Any

import torch
from transformers import BertConfig

from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.trial_model import build_model, prepare_trial_model
from finetune.config.mode import Mode
from finetune.devices.cpu import CpuDevice
from finetune.devices.emulation import dispatching_as_mps, name_on_mps, run_on_cpu
from finetune.devices.mps.operators import status_of
from finetune.doctor.operators import _fake_copy, _Parts, _Recorder
from finetune.model.structure import find_structure

# An operation more than today's fails; one less is to be entered here.
LAUNCHES = {"forward": 367, "loss": 9, "backward": 316, "clipping": 83, "optimizer": 205}
# Composites of a copy or a fill.
SINGLE = {"clone", "copy_", "scalar_tensor"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "_unsafe_view"}


class Launches(_Recorder):
    """Counts what is launched, by the part of the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_on_mps(func)
        if status_of(name) == "composite" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace != "aten":
            return func(*args, **kwargs)
        place = self.places.now()
        in_backward = torch._C._current_autograd_node() is not None
        if place not in ("loss", "clipping", "optimizer"):
            place = "forward"
        result = run_on_cpu(func, *args, **kwargs)
        self.parts["backward" if in_backward else place] += launches_of(func, args, kwargs)
        return result


def launches_of(func: Any, args: Any, kwargs: Any) -> int:
    name = name_on_mps(func)
    if func.is_view or is_launched(name):
        return int(not func.is_view)
    parts = _Parts().of(func, args, kwargs)
    return sum(calls for part, calls in parts.items() if is_launched(part))


def is_launched(name: str) -> bool:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    if (
        packet in ALLOCATIONS
        or getattr(getattr(torch.ops.aten, packet), overload or "default").is_view
    ):
        return False
    return packet in SINGLE or status_of(name) == "native"


def launches_by_part(*, layers: int) -> Counter[str]:
    config = BertConfig(
        hidden_size=264, intermediate_size=264, vocab_size=264, max_position_embeddings=264,
        num_hidden_layers=layers,
    )  # fmt: skip
    case = Case(
        device="cpu",
        architecture=architecture_of(config.to_dict()),
        classes=6,
        mode=Mode("full"),
        padded_length=16,
        precision="fp32",
        optimizer="adamw",
        gradient_checkpointing=False,
    )
    model = build_model(case)
    fake = _fake_copy(model)
    trial = prepare_trial_model(case, fake, find_structure(model), device=CpuDevice())
    launches = Launches(fake)
    launches.places.notice(trial.training_state.optimizer)
    trial.begin()
    with dispatching_as_mps():
        # The first makes the optimizer's state.
        trial.take_step(batch_size=4)
        with launches:
            trial.take_step(batch_size=4)
    return launches.parts


def test_update_of_bert_base_launches_no_more_operations_than_before() -> None:
    one, two = launches_by_part(layers=1), launches_by_part(layers=2)

    assert {part: one[part] + 11 * (two[part] - one[part]) for part in two} == LAUNCHES
