import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from finetune.events import Event, WarningMessage, sent_to
from finetune.files import temporary_path
from finetune.model.tensor_store import TensorStore, key_of, map_tensors, write_rows

GIB = 2**30
FEATURES = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(tmp_path / "features", limit_bytes=GIB)


def keep(
    store: TensorStore, letter: str, features: torch.Tensor = FEATURES, *, age: float = 0
) -> torch.Tensor:
    """Keep features under a key of one letter, as last used some seconds ago."""
    written = store.write(64 * letter, {"features": features})
    if age:
        os.utime(file_of(store, letter), (time.time() - age,) * 2)
    return written["features"]


def read(store: TensorStore, letter: str, *, warnings: int = 0) -> torch.Tensor | None:
    emitted: list[Event] = []
    with sent_to(emitted.append):
        tensors = store.read(64 * letter)
    assert len([one for one in emitted if isinstance(one, WarningMessage)]) == warnings
    return tensors["features"] if tensors else None


def file_of(store: TensorStore, letter: str = "a") -> Path:
    return store.folder / f"{64 * letter}.safetensors"


def letters_of(store: TensorStore) -> str:
    return "".join(file.name[0] for file in store.entries())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_back_bit_for_bit_written_at_once_or_in_pieces(
    store: TensorStore, dtype: torch.dtype
) -> None:
    features = FEATURES.to(dtype)
    written = keep(store, "a", features)
    partial = store.create(64 * "b", "features", (1000, 4), str(dtype).removeprefix("torch."))
    write_rows(partial, [(600, features[600:]), (0, features[:600])])
    mapped = map_tensors(partial)["features"]
    store.keep(partial, 64 * "b")
    others = load_file(file_of(store, "b"))["features"]
    for tensor in (written, read(store, "a"), mapped, read(store, "b"), others):
        assert tensor is not None
        assert tensor.dtype == dtype
        assert torch.equal(tensor, features)
    assert read(store, "c") is None
    if Path("/proc/self/maps").exists():
        assert str(file_of(store)) in Path("/proc/self/maps").read_text()


def test_a_damaged_file_is_reported(store: TensorStore) -> None:
    keep(store, "a")
    file_of(store).write_bytes(file_of(store).read_bytes()[:-1])
    assert read(store, "a", warnings=1) is None
    assert torch.equal(keep(store, "a"), FEATURES)


@pytest.mark.parametrize(
    "content", [None, b"", b"not what it says", b"\xff" * 99, save({"a": torch.ones(1)})]
)
def test_what_no_store_wrote_stays(content: bytes | None, store: TensorStore) -> None:
    store.folder.mkdir()
    if content is None:
        file_of(store).mkdir()
    else:
        file_of(store).write_bytes(content)
    (store.folder / "notes.txt").write_text("mine")
    assert read(store, "a", warnings=int(content is not None)) is None
    assert torch.equal(keep(store, "a"), FEATURES)
    assert (store.entries(), store.clear()) == ([], 0)
    assert file_of(store).is_dir() if content is None else file_of(store).read_bytes() == content
    assert len(list(store.folder.iterdir())) == 2


def test_what_a_killed_run_left_goes_after_a_day(store: TensorStore) -> None:
    keep(store, "a")
    leftover = file_of(store).rename(temporary_path(file_of(store)))
    assert store.entries() == []
    for hours in (23, 25):
        os.utime(leftover, (time.time() - hours * 3600,) * 2)
        keep(store, "b")
        assert leftover.exists() == (hours == 23)
    file_of(store, "b").rename(leftover)
    keep(store, "b")
    assert store.clear() > 2 * FEATURES.nbytes
    assert list(store.folder.iterdir()) == []


def test_the_least_recently_used_goes_first_and_stays_readable(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, limit_bytes=3 * FEATURES.nbytes + 1000)
    for age, letter in ((30, "a"), (20, "b"), (10, "c")):
        keep(store, letter, age=age)
    assert letters_of(store) == "cba"
    mapped = read(store, "a")
    keep(store, "d")
    assert sorted(letters_of(store)) == ["a", "c", "d"]
    large = torch.randn(10_000, 4)
    assert torch.equal(keep(store, "e", large), large)
    assert sorted(letters_of(store)) == ["a", "c", "d"]
    store.clear()
    assert mapped is not None
    assert torch.equal(mapped, FEATURES)


def test_every_part_of_a_key_and_their_order_count() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    one_bit = tensor.clone()
    one_bit.view(torch.int32)[3] ^= 1
    parts = [[], ["a"], ["a", "b"], ["b", "a"], ["ab"], ["a", tensor], [tensor, "a"]]
    parts += [["a", one_bit], ["a", tensor.reshape(2, 3)], ["a", tensor.view(torch.int32)]]
    parts += [["a", tensor[:5], tensor[5:]]]
    assert len(set(map(key_of, parts))) == len(parts)
    assert key_of(["a", tensor]) == key_of(["a", tensor.clone()])
    assert key_of([tensor.reshape(2, 3).T.contiguous()]) == key_of([tensor.reshape(2, 3).T])
