import hashlib
import json
import os
import resource
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from finetune.events import Event, WarningMessage
from finetune.model.tensor_store import TensorStore, key_of

GIB = 2**30
OpenStore = Callable[[], TensorStore]


def pieces_of(features: torch.Tensor, *, rows: int = 3) -> Iterator[torch.Tensor]:
    yield from features.split(rows)


def random_features(
    vectors: int = 10, hidden_size: int = 4, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vectors * hidden_size)
    return torch.randn(vectors, hidden_size, generator=generator).to(dtype)


def read_quietly(store: TensorStore, key: str) -> torch.Tensor | None:
    """Read, and expect no warning."""
    emitted: list[Event] = []
    tensors = store.read(key, emit=emitted.append)
    assert emitted == []
    return None if tensors is None else tensors["features"]


def write_pieces(
    store: TensorStore, key: str, pieces: Iterable[torch.Tensor], *, shape: tuple[int, int]
) -> torch.Tensor:
    return store.write(key, pieces, shapes={"features": shape}, notes={})["features"]


def write(store: TensorStore, key: str, features: torch.Tensor) -> torch.Tensor:
    return write_pieces(store, key, pieces_of(features), shape=(len(features), features.shape[1]))


def keep(
    store: TensorStore, key: str, features: torch.Tensor, *, used_at: float | None = None
) -> Path:
    """Keep features, as last used at a time; return their file."""
    store.write(
        key, pieces_of(features), shapes={"features": (len(features), features.shape[1])},
        notes={"rows": len(features)},
    )  # fmt: skip
    file = store.folder / f"{key}.safetensors"
    if used_at is not None:
        os.utime(file, (used_at, used_at))
    return file


def keys_of(store: TensorStore) -> list[str]:
    return [entry.key for entry in store.entries()]


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(tmp_path / "features", limit_bytes=GIB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_come_back_bit_for_bit(store: TensorStore, dtype: torch.dtype) -> None:
    features = random_features(dtype=dtype)
    written = write(store, "a", features)
    read = read_quietly(store, "a")
    assert read is not None
    for one in (written, read):
        assert one.dtype == dtype
        assert torch.equal(one.view(torch.uint8), features.view(torch.uint8))


def test_a_key_that_nobody_wrote_stands_for_nothing(store: TensorStore) -> None:
    assert read_quietly(store, "a") is None
    keep(store, "a", random_features())
    assert read_quietly(store, "b") is None


def test_features_are_safetensors_that_others_can_read(store: TensorStore) -> None:
    features = random_features(7, 3, torch.bfloat16)
    file = keep(store, "a", features)
    assert torch.equal(load_file(file)["features"], features)
    assert json.loads((store.folder / "a.json").read_text()) == {
        "rows": 7,
        "dtype": "bfloat16",
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }


def anonymous_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    [line] = [one for one in status.read_text().splitlines() if one.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_what_is_read_is_mapped_and_not_copied(store: TensorStore) -> None:
    file = keep(store, "a", torch.zeros(2**12, 2**11))
    before = anonymous_bytes()
    features = read_quietly(store, "a")
    assert features is not None
    assert features.sum() == 0
    assert anonymous_bytes() - before < 2**23 < file.stat().st_size
    assert str(file) in Path("/proc/self/maps").read_text()


def test_pieces_are_written_as_they_come(store: TensorStore) -> None:
    def pieces() -> Iterator[torch.Tensor]:
        for _ in range(64):
            yield torch.zeros(64, 2**11)

    before = anonymous_bytes()
    peaks = []
    write_pieces(
        store,
        "a",
        (piece for piece in pieces() if not peaks.append(anonymous_bytes() - before)),  # type: ignore[func-returns-value]
        shape=(2**12, 2**11),
    )
    assert max(peaks) < 2**23


@pytest.mark.parametrize("shape", [(9, 4), (11, 4), (10, 5)])
def test_pieces_of_another_shape_than_said_are_an_error_and_leave_nothing(
    shape: tuple[int, int], store: TensorStore
) -> None:
    with pytest.raises(SafetensorError):
        write_pieces(store, "a", pieces_of(random_features(10, 4)), shape=shape)
    assert list(store.folder.iterdir()) == []


def test_a_split_without_texts_is_kept(store: TensorStore) -> None:
    assert write_pieces(store, "a", [], shape=(0, 4)).shape == (0, 4)
    read = read_quietly(store, "a")
    assert read is not None
    assert read.shape == (0, 4)


def test_changes_to_what_was_read_do_not_reach_the_file(store: TensorStore) -> None:
    file = keep(store, "a", random_features())
    before = file.read_bytes()
    features = read_quietly(store, "a")
    assert features is not None
    features.zero_()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:10],
        lambda content: b"",
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content[:-1] + bytes([content[-1] ^ 4]),
        lambda content: content + b"\n",
        lambda content: b"not a file of this store",
    ],
)
def test_damage_is_reported_and_new_features_take_the_place(
    damage: object, store: TensorStore
) -> None:
    file = keep(store, "a", random_features())
    content = file.read_bytes()
    file.write_bytes(damage(content))  # type: ignore[operator]
    emitted: list[Event] = []
    assert store.read("a", emit=emitted.append) is None
    [warning] = emitted
    assert isinstance(warning, WarningMessage)
    assert "a.safetensors is damaged" in warning.message
    keep(store, "a", random_features())
    assert file.read_bytes() == content
    assert read_quietly(store, "a") is not None


@pytest.mark.parametrize(
    "facts", ["", "{", "[]", "null", "{}", '{"sha256": 3}', '{"sha256": "0"}', "\udcff"]
)
def test_facts_that_say_something_else_are_damage(facts: str, store: TensorStore) -> None:
    keep(store, "a", random_features())
    (store.folder / "a.json").write_bytes(facts.encode("utf-8", "surrogateescape"))
    emitted: list[Event] = []
    assert store.read("a", emit=emitted.append) is None
    assert len(emitted) == 1


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_half_an_entry_is_none(suffix: str, store: TensorStore) -> None:
    keep(store, "a", random_features())
    (store.folder / f"a{suffix}").unlink()
    assert read_quietly(store, "a") is None
    keep(store, "a", random_features())
    assert read_quietly(store, "a") is not None


def test_a_failure_halfway_leaves_nothing(store: TensorStore) -> None:
    def failing() -> Iterator[torch.Tensor]:
        yield random_features()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_pieces(store, "a", failing(), shape=(20, 4))
    assert list(store.folder.iterdir()) == []
    assert read_quietly(store, "a") is None


def test_what_a_killed_process_left_is_never_read_and_goes_after_a_day(store: TensorStore) -> None:
    def dying() -> Iterator[torch.Tensor]:
        yield random_features()
        left.extend((path, path.read_bytes()) for path in store.folder.iterdir())
        raise KeyboardInterrupt

    left: list[tuple[Path, bytes]] = []
    with pytest.raises(KeyboardInterrupt):
        write_pieces(store, "a", dying(), shape=(20, 4))
    [(leftover, content)] = left
    leftover.write_bytes(content)
    assert read_quietly(store, "a") is None
    assert store.entries() == []

    keep(store, "b", random_features())
    assert leftover.exists()  # another process may be writing to it
    for hours in (23, 25):
        assert leftover.exists()
        then = time.time() - hours * 3600
        os.utime(leftover, (then, then))
        keep(store, "c", random_features())
    assert sorted(path.name for path in store.folder.iterdir()) == [
        f"{key}{suffix}" for key in "bc" for suffix in (".json", ".safetensors")
    ]


def test_what_another_user_has_left_keeps_nobody_from_writing(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.folder.mkdir()
    leftover = store.folder / "left.partial"
    leftover.write_bytes(b"123")
    os.utime(leftover, (1, 1))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == leftover:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    keep(store, "a", random_features())
    assert keys_of(store) == ["a"]


@pytest.fixture
def open_small_store(tmp_path: Path) -> OpenStore:
    """Return what opens a store, as each run does, with room for three entries of ten features."""
    size_bytes = keep(
        TensorStore(tmp_path / "size", limit_bytes=GIB), "a", random_features()
    ).stat()
    return lambda: TensorStore(tmp_path / "features", limit_bytes=3 * size_bytes.st_size)


def test_what_was_not_used_for_the_longest_time_goes_first(
    open_small_store: OpenStore,
) -> None:
    now = time.time()
    for age, key in enumerate("abc"):
        keep(open_small_store(), key, random_features(), used_at=now - 100 + age)
    assert keys_of(open_small_store()) == ["c", "b", "a"]
    assert read_quietly(open_small_store(), "a") is not None
    keep(open_small_store(), "d", random_features())
    assert sorted(keys_of(open_small_store())) == ["a", "c", "d"]
    assert not (open_small_store().folder / "b.json").exists()


def test_what_this_run_has_read_or_written_is_not_evicted(
    open_small_store: OpenStore,
) -> None:
    now = time.time()
    for age, key in enumerate("abc"):
        keep(open_small_store(), key, random_features(), used_at=now - 100 + age)
    run = open_small_store()
    assert read_quietly(run, "a") is not None
    os.utime(run.folder / "a.safetensors", (1, 1))
    keep(run, "d", random_features(), used_at=2)
    keep(run, "e", random_features(), used_at=3)
    assert sorted(keys_of(run)) == ["a", "d", "e"]
    features = random_features(9)
    assert torch.equal(write(run, "f", features), features)
    assert sorted(keys_of(run)) == ["a", "d", "e"]


def test_what_was_just_written_stays_even_beside_files_from_the_future(
    open_small_store: OpenStore,
) -> None:
    for key in "abc":
        keep(open_small_store(), key, random_features(), used_at=2**32)
    keep(open_small_store(), "d", random_features())
    assert "d" in keys_of(open_small_store())
    assert len(keys_of(open_small_store())) == 3


def test_room_is_made_before_an_entry_is_written(
    open_small_store: OpenStore,
) -> None:
    for key in "abc":
        keep(open_small_store(), key, random_features())
    store = open_small_store()

    def pieces() -> Iterator[torch.Tensor]:
        yield random_features()[:5]
        assert len(store.entries()) == 2
        yield random_features()[5:]

    write_pieces(store, "d", pieces(), shape=(10, 4))


def test_an_entry_that_takes_the_place_of_its_own_evicts_no_other(
    open_small_store: OpenStore,
) -> None:
    for key in "abca":
        keep(open_small_store(), key, random_features())
    assert sorted(keys_of(open_small_store())) == ["a", "b", "c"]


def test_features_that_are_evicted_or_cleared_stay_readable_to_whom_they_were_given(
    open_small_store: OpenStore,
) -> None:
    features = random_features()
    written = write(open_small_store(), "a", features)
    read = read_quietly(open_small_store(), "a")
    for key in "bcd":
        keep(open_small_store(), key, features)
    assert "a" not in keys_of(open_small_store())
    open_small_store().clear()
    assert read is not None
    assert torch.equal(written, features)
    assert torch.equal(read, features)


def test_features_larger_than_the_limit_are_given_back_and_not_kept(
    open_small_store: OpenStore,
) -> None:
    keep(open_small_store(), "small", random_features())
    large = random_features(1000)
    assert torch.equal(write(open_small_store(), "large", large), large)
    names = sorted(path.name for path in open_small_store().folder.iterdir())
    assert names == ["small.json", "small.safetensors"]


def test_the_disk_is_asked_for_room_and_what_would_be_evicted_counts(
    open_small_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(free_bytes: int) -> None:
        usage = shutil.disk_usage("/")._replace(free=free_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    free(500)
    store = open_small_store()
    size_bytes = store.limit_bytes // 3
    assert store.would_fit(500)
    assert not store.would_fit(501)  # before there is a folder
    for key in "abc":
        keep(open_small_store(), key, random_features())
    free(size_bytes - 1)
    assert open_small_store().would_fit(size_bytes)
    assert open_small_store().would_fit(2 * size_bytes)
    free(store.limit_bytes)
    # What is larger than the limit evicts nothing.
    assert open_small_store().would_fit(store.limit_bytes)
    assert not open_small_store().would_fit(store.limit_bytes + 1)
    free(size_bytes - 1)
    for key in "abc":
        read_quietly(store, key)
    assert not store.would_fit(size_bytes)


def test_two_writers_of_one_key_do_not_disturb_each_other(store: TensorStore) -> None:
    features = random_features(1000)
    both_write = threading.Barrier(2)
    errors: list[BaseException] = []

    def slowly() -> Iterator[torch.Tensor]:
        for piece in features.split(10):
            yield piece
            both_write.wait(timeout=60)

    def write() -> None:
        try:
            for _ in range(3):
                assert torch.equal(write_pieces(store, "a", slowly(), shape=(1000, 4)), features)
        except BaseException as error:
            errors.append(error)
            both_write.abort()

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(path.name for path in store.folder.iterdir()) == ["a.json", "a.safetensors"]
    read = read_quietly(store, "a")
    assert read is not None
    assert torch.equal(read, features)


@contextmanager
def small_files() -> Iterator[None]:
    """Let the system refuse files of more than 4 KiB, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_without_room_is_an_error_and_leaves_nothing(store: TensorStore) -> None:
    # No longer than needed: pytest's own output may go to a file.
    with pytest.raises(OSError, match="File too large"), small_files():
        keep(store, "a", random_features(10_000))
    assert list(store.folder.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "file/features"])
def test_a_folder_that_is_a_file_holds_nothing_and_takes_nothing(
    folder: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    store = TensorStore(tmp_path / folder, limit_bytes=GIB)
    assert read_quietly(store, "a") is None
    assert store.entries() == []
    assert store.clear() == 0
    with pytest.raises(OSError, match="file"):
        write(store, "a", random_features())


def test_a_store_that_may_only_be_read_is_read(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, "a", random_features())

    def refuse(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert read_quietly(store, "a") is not None


def test_entries_say_what_they_are_the_last_used_first(store: TensorStore) -> None:
    now = time.time()
    file = keep(store, "a", random_features(), used_at=now - 10)
    keep(store, "b", random_features(7, 2, torch.bfloat16), used_at=now - 20)
    first, second = store.entries()
    assert (first.key, second.key) == ("a", "b")
    assert first.size_bytes == file.stat().st_size
    assert first.used_at == pytest.approx(now - 10, abs=0.01)
    assert {**first.facts, "sha256": ""} == {
        "rows": 10,
        "dtype": "float32",
        "sha256": "",
    }
    assert second.facts["dtype"] == "bfloat16"


@pytest.mark.parametrize("facts", [None, "", "[1]", "\udcff{"])
def test_junk_is_listed_takes_room_and_goes_like_the_rest(
    facts: str | None, open_small_store: OpenStore
) -> None:
    keep(open_small_store(), "a", random_features())
    junk = open_small_store().folder / "junk.safetensors"
    junk.write_bytes(b"\0" * (open_small_store().limit_bytes // 2))
    os.utime(junk, (1, 1))
    if facts is not None:
        junk.with_suffix(".json").write_bytes(facts.encode("utf-8", "surrogateescape"))
    _, entry = open_small_store().entries()
    assert (entry.key, entry.facts) == ("junk", {})
    keep(open_small_store(), "b", random_features())
    assert sorted(keys_of(open_small_store())) == ["a", "b"]


def test_clearing_frees_what_is_kept_and_leaves_what_is_not_the_stores(
    store: TensorStore,
) -> None:
    keep(store, "a", random_features())
    (store.folder / "half.partial").write_bytes(b"123")
    size_bytes = sum(path.stat().st_size for path in store.folder.iterdir())
    (store.folder / "notes.txt").write_text("mine")
    (store.folder / "folder.txt").mkdir()
    assert store.clear() == size_bytes
    assert sorted(path.name for path in store.folder.iterdir()) == ["folder.txt", "notes.txt"]
    assert store.clear() == 0


def test_what_another_process_deletes_first_is_not_counted(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, "a", random_features())

    def deleted_before(path: Path, missing_ok: bool = False) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "unlink", deleted_before)
    assert store.clear() == 0


def test_a_key_takes_one_part_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def parts() -> Iterator[str | torch.Tensor]:
        for number in range(3):
            assert all(one() is None for one in alive[:-1])
            tensor = torch.full((3,), number)
            alive.append(weakref.ref(tensor))
            yield tensor
            del tensor

    assert key_of(parts()) == key_of([torch.full((3,), number) for number in range(3)])


def test_every_part_of_a_key_and_their_order_count() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    one_bit = tensor.clone()
    one_bit.view(torch.int32)[3] ^= 1
    keys = [
        key_of(parts)
        for parts in (
            [],
            ["a"],
            ["b"],
            ["a", "b"],
            ["b", "a"],
            ["ab"],
            ["a", tensor],
            [tensor, "a"],
            ["a", one_bit],
            ["a", tensor.reshape(2, 3)],
            ["a", tensor.reshape(3, 2)],
            ["a", tensor.view(torch.int32)],
            ["a", tensor[:5], tensor[5:]],
        )
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(["a", tensor]) == key_of(["a", tensor.clone()])
    assert key_of([tensor.reshape(2, 3).T.contiguous()]) == key_of([tensor.reshape(2, 3).T])
    assert key_of([torch.zeros(0)]) != key_of([torch.tensor(0.0)])
    assert key_of([torch.tensor([True, False])]) != key_of([torch.tensor([False, True])])
