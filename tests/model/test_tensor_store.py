import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from finetune.events import Event, WarningMessage
from finetune.files import temporary_path
from finetune.model import tensor_store
from finetune.model.tensor_store import TensorStore, key_of

GIB = 2**30
A = 64 * "a"
OpenStore = Callable[[], TensorStore]


def random_features(
    vectors: int = 1000, hidden_size: int = 4, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vectors * hidden_size)
    return torch.randn(vectors, hidden_size, generator=generator).to(dtype)


def read_quietly(store: TensorStore, key: str) -> torch.Tensor | None:
    """Read an entry whose key is one letter, 64 times, and expect no warning."""
    emitted: list[Event] = []
    tensors = store.read(64 * key, emit=emitted.append)
    assert emitted == []
    return None if tensors is None else tensors["features"]


def keep(
    store: TensorStore, key: str, features: torch.Tensor, *, used_at: float | None = None
) -> torch.Tensor:
    """Keep features as a run does, as last used at a time."""
    is_kept = store.make_room(features.nbytes)
    tensors = {"features": features}
    written = store.write(64 * key, tensors, is_kept=is_kept, notes={"rows": 7})
    if used_at is not None:
        os.utime(file_of(store, key), (used_at, used_at))
    return written["features"]


def file_of(store: TensorStore, key: str = "a") -> Path:
    return store.folder / f"{64 * key}.safetensors"


def keys_of(store: TensorStore) -> list[str]:
    return [entry.key[0] for entry in store.entries()]


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(tmp_path / "features", limit_bytes=GIB)


@pytest.fixture
def open_small_store(tmp_path: Path) -> OpenStore:
    """Return what opens a store, as each run does, with room for three entries."""
    size_store = TensorStore(tmp_path / "size", limit_bytes=GIB)
    keep(size_store, "a", random_features())
    [entry] = size_store.entries()
    return lambda: TensorStore(tmp_path / "features", limit_bytes=3 * entry.size_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_come_back_bit_for_bit(store: TensorStore, dtype: torch.dtype) -> None:
    features = random_features(dtype=dtype)
    written = keep(store, "a", features)
    read = read_quietly(store, "a")
    assert read is not None
    for one in (written, read):
        assert one.dtype == dtype
        assert torch.equal(one.view(torch.uint8), features.view(torch.uint8))
    assert read_quietly(store, "b") is None


def test_an_entry_holds_safetensors_that_others_can_read_and_says_what_they_are(
    store: TensorStore,
) -> None:
    features = random_features(400)
    keep(store, "a", features)
    assert torch.equal(load_file(file_of(store))["features"], features)
    notes = {"rows": 7, "written_by": "finetune", "dtype": "float32"}
    [entry] = store.entries()
    assert entry.notes == notes
    assert entry.size_bytes > features.nbytes
    assert entry.used_at == pytest.approx(time.time(), abs=60)


def test_what_is_read_is_mapped_and_not_copied(store: TensorStore) -> None:
    keep(store, "a", torch.zeros(2**12, 2**11))
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    tensors = store.read(A, emit=lambda event: None)
    assert tensors is not None
    assert str(file_of(store)) in Path("/proc/self/maps").read_text()


def test_damage_is_reported_and_a_new_entry_takes_the_place(store: TensorStore) -> None:
    keep(store, "a", random_features())
    file = file_of(store)
    file.write_bytes(file.read_bytes()[:-1])
    emitted: list[Event] = []
    assert store.read(A, emit=emitted.append) is None
    [warning] = emitted
    assert isinstance(warning, WarningMessage)
    assert f"{A}.safetensors is damaged and is made anew" in warning.message
    keep(store, "a", random_features())
    assert read_quietly(store, "a") is not None


@pytest.mark.parametrize(
    "content", [b"", b"not what it says", b"\xff" * 99, save({"a": torch.ones(1)})]
)
def test_a_file_that_no_store_has_written_stays(content: bytes, store: TensorStore) -> None:
    store.folder.mkdir()
    file_of(store).write_bytes(content)
    emitted: list[Event] = []
    assert store.read(A, emit=emitted.append) is None
    assert len(emitted) == 1
    assert torch.equal(keep(store, "a", random_features()), random_features())
    assert (store.entries(), store.clear(), file_of(store).read_bytes()) == ([], 0, content)


def test_a_folder_in_the_place_of_an_entry_stays(store: TensorStore) -> None:
    file_of(store).mkdir(parents=True)
    assert read_quietly(store, "a") is None
    assert torch.equal(keep(store, "a", random_features()), random_features())
    assert (store.entries(), store.clear(), file_of(store).is_dir()) == ([], 0, True)


def test_a_failure_halfway_leaves_nothing(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_store, "flush_to_disk", fail)
    with pytest.raises(KeyboardInterrupt):
        keep(store, "a", random_features())
    assert list(store.folder.iterdir()) == []
    assert read_quietly(store, "a") is None


def test_what_a_killed_process_left_is_never_read_and_goes_after_a_day(store: TensorStore) -> None:
    keep(store, "a", random_features())
    leftover = file_of(store).rename(temporary_path(file_of(store)))
    assert store.entries() == []
    for hours in (23, 25):
        then = time.time() - hours * 3600
        os.utime(leftover, (then, then))
        keep(store, "b", random_features())
        assert leftover.exists() == (hours == 23)  # another process may be writing to it


def test_what_was_not_used_for_the_longest_time_goes_first(open_small_store: OpenStore) -> None:
    now = time.time()
    for age, key in enumerate("abc"):
        keep(open_small_store(), key, random_features(), used_at=now - 100 + age)
    assert keys_of(open_small_store()) == ["c", "b", "a"]
    assert read_quietly(open_small_store(), "a") is not None
    keep(open_small_store(), "d", random_features())
    assert sorted(keys_of(open_small_store())) == ["a", "c", "d"]


def test_what_is_evicted_or_cleared_stays_readable_to_whom_it_was_given(
    open_small_store: OpenStore,
) -> None:
    features = random_features()
    written = keep(open_small_store(), "a", features)
    read = open_small_store().read(A, emit=lambda event: None)
    for key in "bcd":
        keep(open_small_store(), key, features)
    assert "a" not in keys_of(open_small_store())
    open_small_store().clear()
    assert read is not None
    assert torch.equal(written, features)
    assert torch.equal(read["features"], features)


def test_what_is_larger_than_the_limit_is_given_back_and_not_kept(
    open_small_store: OpenStore,
) -> None:
    keep(open_small_store(), "a", random_features())
    large = random_features(10_000)
    assert torch.equal(keep(open_small_store(), "b", large), large)
    assert list(open_small_store().folder.iterdir()) == [file_of(open_small_store())]


def test_a_disk_without_room_is_noticed_before_anything_is_computed(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    with pytest.raises(OSError, match="No space left"):
        store.make_room(501)
    assert list(store.folder.iterdir()) == []


def test_two_writers_of_one_key_do_not_disturb_each_other(store: TensorStore) -> None:
    features = random_features(1000)
    is_kept = store.make_room(features.nbytes)
    keep(store, "a", features)
    written = store.write(A, {"features": features}, is_kept=is_kept, notes={})
    assert torch.equal(written["features"], features)
    assert list(store.folder.iterdir()) == [file_of(store)]
    read = read_quietly(store, "a")
    assert read is not None
    assert torch.equal(read, features)


def test_a_store_that_may_only_be_read_is_read(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, "a", random_features())

    def refuse(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert read_quietly(store, "a") is not None


def test_clearing_frees_what_is_kept_and_leaves_what_is_not_the_stores(store: TensorStore) -> None:
    keep(store, "a", random_features())
    keep(store, "b", random_features())
    [size_bytes, _] = [entry.size_bytes for entry in store.entries()]
    file_of(store).rename(temporary_path(file_of(store)))
    (store.folder / "notes.txt").write_text("mine")
    (store.folder / "folder").mkdir()
    assert store.clear() == 2 * size_bytes
    assert sorted(path.name for path in store.folder.iterdir()) == ["folder", "notes.txt"]


def test_every_part_of_a_key_and_their_order_count() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    one_bit = tensor.clone()
    one_bit.view(torch.int32)[3] ^= 1
    keys = [
        key_of(parts)
        for parts in (
            [],
            ["a"],
            ["a", "b"],
            ["b", "a"],
            ["ab"],
            ["a", tensor],
            [tensor, "a"],
            ["a", one_bit],
            ["a", tensor.reshape(2, 3)],
            ["a", tensor.view(torch.int32)],
            ["a", tensor[:5], tensor[5:]],
        )
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(["a", tensor]) == key_of(["a", tensor.clone()])
    assert key_of([tensor.reshape(2, 3).T.contiguous()]) == key_of([tensor.reshape(2, 3).T])
