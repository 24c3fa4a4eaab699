import os
import time
from pathlib import Path

import pytest
import torch

from finetune.files import temporary_path
from finetune.model.tensor_store import TensorStore, key_of, map_vectors, write_vectors

SHAPE = (1000, 4)
FEATURES = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(tmp_path / "features", limit_bytes=2**30)


def keep(
    store: TensorStore, letter: str, features: torch.Tensor = FEATURES, *, age: float = 0
) -> torch.Tensor:
    """Store features under a one-letter key, last used ``age`` seconds ago."""
    shape = len(features), 4
    with store.creating(64 * letter, shape) as partial:
        write_vectors(partial, [(600, features[600:]), (0, features[:600])])
        mapped = map_vectors(partial, shape)
    if age:
        os.utime(store.folder / f"{64 * letter}.features", (time.time() - age,) * 2)
    return mapped


def stored_letters(store: TensorStore) -> str:
    return "".join(file.name[0] for file in store.files())


def test_stored_features_are_bit_identical_and_replace_damaged_files(store: TensorStore) -> None:
    file = store.folder / f"{64 * 'a'}.features"
    for _ in range(2):
        assert store.read(64 * "a", SHAPE) is None
        assert torch.equal(keep(store, "a"), FEATURES)
        stored = store.read(64 * "a", SHAPE)
        assert stored is not None
        assert torch.equal(stored, FEATURES)
        file.write_bytes(file.read_bytes()[:-1])


def test_least_recently_used_features_are_deleted_first_and_stay_readable(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, limit_bytes=3 * (FEATURES.nbytes + 32))  # and a digest
    (tmp_path / "notes.features").write_text("mine")
    for age, letter in ((30, "a"), (20, "b"), (10, "c")):
        keep(store, letter, age=age)
    assert stored_letters(store) == "cba"
    mapped = store.read(64 * "a", SHAPE)
    keep(store, "d")
    assert sorted(stored_letters(store)) == ["a", "c", "d"]
    large = torch.randn(10_000, 4)
    assert torch.equal(keep(store, "e", large), large)
    assert sorted(stored_letters(store)) == ["a", "c", "d"]
    # A killed run left this file, whose size is also counted.
    left = temporary_path(tmp_path / f"{64 * 'f'}.features")
    (tmp_path / f"{64 * 'a'}.features").rename(left)
    assert "f" in stored_letters(store)
    (tmp_path / f"{64 * '9'}.safetensors").touch()  # from an earlier version
    for file in store.files():
        file.unlink()
    assert mapped is not None
    assert torch.equal(mapped, FEATURES)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.features"]


def test_key_depends_on_all_parts_and_their_order() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    one_bit = tensor.clone()
    one_bit.view(torch.int32)[3] ^= 1
    parts = [[], ["a"], ["a", "b"], ["b", "a"], ["ab"], ["a", tensor], [tensor, "a"]]
    parts += [["a", one_bit], ["a", tensor.reshape(2, 3)], ["a", tensor.view(torch.int32)]]
    parts += [["a", tensor[:5], tensor[5:]]]
    assert len(set(map(key_of, parts))) == len(parts)
    assert key_of([tensor.reshape(2, 3).T.contiguous()]) == key_of([tensor.reshape(2, 3).T])
