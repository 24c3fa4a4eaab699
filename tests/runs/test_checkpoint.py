from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import CheckpointDamagedError
from finetune.runs.checkpoint import read_checkpoint, write_checkpoint
from finetune.runs.folder import RunFolder

STATE = {"step": 7, "best": 0.1 + 0.2, "tiny": 5e-324, "seen": [1, 2, 3], "none": None}


def write_step(folder: Path, step: int) -> Path:
    path = folder / f"step-{step}"
    tensors = {"model": {"weight": torch.full((4,), float(step))}}
    write_checkpoint(path, tensors=tensors, state={"step": step})
    return path


def flip_bit(file: Path, *, position: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[position % len(content)] ^= 1 << bit
    file.write_bytes(content)


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert {group: set(tensors) for group, tensors in left.items()} == {
        group: set(tensors) for group, tensors in right.items()
    }
    for group, tensors in left.items():
        for name, tensor in tensors.items():
            assert tensor.dtype == right[group][name].dtype
            assert torch.equal(tensor, right[group][name])


def test_tensors_and_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "model": {"weight": torch.randn(3, 5), "transposed": torch.randn(2, 3).T},
        "optimizer": {"step": torch.tensor(7.0), "half": torch.randn(4).bfloat16()},
        "random": {"generator": torch.get_rng_state()},
        "empty": {},
    }

    write_checkpoint(tmp_path / "checkpoints" / "step-7", tensors=tensors, state=STATE)
    read_tensors, state = read_checkpoint(tmp_path / "checkpoints" / "step-7")

    assert_same(read_tensors, tensors)
    assert repr(state) == repr(STATE)


@settings(max_examples=30)
@given(
    name=st.sampled_from(["manifest.json", "model.safetensors", "state.json"]),
    position=st.integers(0, 10_000),
    bit=st.integers(0, 7),
)
def test_flipped_bit_is_noticed_or_alters_nothing(
    tmp_path_factory: pytest.TempPathFactory, name: str, position: int, bit: int
) -> None:
    folder = write_step(tmp_path_factory.getbasetemp(), 1)
    tensors, state = read_checkpoint(folder)

    flip_bit(folder / name, position=position, bit=bit)

    # A flip may turn one white space of the manifest into another.
    try:
        read_tensors, read_state = read_checkpoint(folder)
    except CheckpointDamagedError:
        return
    assert_same(read_tensors, tensors)
    assert read_state == state


def test_checkpoints_are_sorted_by_step_and_not_by_name(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (9, 10, 2):
        write_step(run.checkpoints_folder, step)
    for name in ("step-11", "step-best"):  # not whole
        (run.checkpoints_folder / name).mkdir()

    assert [path.name for path in run.checkpoints] == ["step-10", "step-9", "step-2"]
