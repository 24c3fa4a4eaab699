import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from finetune.events import Event, WarningMessage
from finetune.model.feature_store import FeatureStore, key_of

GIB = 2**30


def pieces_of(lines: torch.Tensor, *, rows: int = 3) -> Iterator[torch.Tensor]:
    yield from lines.split(rows)


def random_lines(
    lines: int = 10, width: int = 4, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(lines * width)
    return torch.randn(lines, width, generator=generator).to(dtype)


def read_quietly(store: FeatureStore, key: str) -> torch.Tensor | None:
    """Read, and expect no warning."""
    emitted: list[Event] = []
    lines = store.read(key, emit=emitted.append)
    assert emitted == []
    return lines


def keep(
    store: FeatureStore, key: str, lines: torch.Tensor, *, used_at: float | None = None
) -> Path:
    """Keep lines, as last used at a time; return their file."""
    store.write(key, pieces_of(lines), notes={"rows": len(lines)})
    file = store.folder / f"{key}.lines"
    if used_at is not None:
        os.utime(file, (used_at, used_at))
    return file


def keys_of(store: FeatureStore) -> list[str]:
    return [entry.key for entry in store.entries()]


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return FeatureStore(tmp_path / "features", limit_bytes=GIB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lines_come_back_bit_for_bit(store: FeatureStore, dtype: torch.dtype) -> None:
    lines = random_lines(dtype=dtype)
    written = store.write("a", pieces_of(lines), notes={})
    read = read_quietly(store, "a")
    assert read is not None
    for one in (written, read):
        assert one.dtype == dtype
        assert torch.equal(one.view(torch.uint8), lines.view(torch.uint8))


def test_lines_that_hold_line_ends_come_back(store: FeatureStore) -> None:
    lines = torch.full((50_000,), int.from_bytes(b"\n\n\n\n", "little"), dtype=torch.int32)
    keep(store, "a", lines.view(torch.float32).reshape(-1, 8))
    read = read_quietly(store, "a")
    assert read is not None
    assert torch.equal(read.view(torch.int32).reshape(-1), lines)


def test_a_key_that_nobody_wrote_stands_for_nothing(store: FeatureStore) -> None:
    assert read_quietly(store, "a") is None
    keep(store, "a", random_lines())
    assert read_quietly(store, "b") is None


def test_what_is_read_is_mapped_and_not_copied(store: FeatureStore) -> None:
    keep(store, "a", random_lines(2**14, 256))
    lines = read_quietly(store, "a")
    assert lines is not None
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("needs /proc")
    assert str(store.folder / "a.lines") in mapped.read_text()


def test_changes_to_what_was_read_do_not_reach_the_file(store: FeatureStore) -> None:
    file = keep(store, "a", random_lines())
    before = file.read_bytes()
    lines = read_quietly(store, "a")
    assert lines is not None
    lines.zero_()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:10],
        lambda content: b"",
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content.replace(b'"shape": [10, 4]', b'"shape": [20, 2]'),
        lambda content: content.replace(b"float32", b"int32\0\0"),
        lambda content: content.replace(b"{", b"["),
        lambda content: content[:-64] + b"0" * 64,
        lambda content: content + b"\n",
        lambda content: b"not a file of this store",
    ],
)
def test_damage_is_told_and_what_is_made_anew_takes_its_place(
    damage: object, store: FeatureStore
) -> None:
    file = keep(store, "a", random_lines())
    content = file.read_bytes()
    file.write_bytes(damage(content))  # type: ignore[operator]
    emitted: list[Event] = []
    assert store.read("a", emit=emitted.append) is None
    [warning] = emitted
    assert isinstance(warning, WarningMessage)
    assert "a.lines is damaged" in warning.message
    keep(store, "a", random_lines())
    assert file.read_bytes() == content
    assert read_quietly(store, "a") is not None


def test_a_single_bit_anywhere_in_a_file_is_found(store: FeatureStore) -> None:
    file = keep(store, "a", random_lines(3, 2))
    content = file.read_bytes()
    for position in range(len(content)):
        flipped = bytes([content[position] ^ 4])
        file.write_bytes(content[:position] + flipped + content[position + 1 :])
        emitted: list[Event] = []
        assert store.read("a", emit=emitted.append) is None
        assert len(emitted) == 1


def test_a_failure_halfway_leaves_nothing(store: FeatureStore) -> None:
    def failing() -> Iterator[torch.Tensor]:
        yield random_lines()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write("a", failing(), notes={})
    assert list(store.folder.iterdir()) == []
    assert read_quietly(store, "a") is None


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from finetune.model.feature_store import FeatureStore

def pieces():
    yield torch.ones(100_000, 4)
    os.kill(os.getpid(), signal.SIGKILL)

FeatureStore(Path(sys.argv[1]), limit_bytes=2**30).write("a", pieces(), notes={})
"""


def test_what_a_killed_process_left_is_never_read_and_goes_after_a_day(store: FeatureStore) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(store.folder)], check=False)
    assert process.returncode == -signal.SIGKILL
    [leftover] = store.folder.iterdir()
    assert read_quietly(store, "a") is None
    assert store.entries() == []

    keep(store, "b", random_lines())
    assert leftover.exists()  # another process may be writing to it
    yesterday = time.time() - 25 * 3600
    os.utime(leftover, (yesterday, yesterday))
    keep(store, "c", random_lines())
    assert sorted(path.name for path in store.folder.iterdir()) == ["b.lines", "c.lines"]


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    lines = random_lines()
    size_bytes = keep(FeatureStore(tmp_path, limit_bytes=GIB), "a", lines).stat().st_size
    store = FeatureStore(tmp_path, limit_bytes=3 * size_bytes)
    now = time.time()
    for age, key in enumerate("abc"):
        keep(store, key, lines, used_at=now - 100 + age)
    assert keys_of(store) == ["c", "b", "a"]
    assert read_quietly(store, "a") is not None
    keep(store, "d", lines)
    assert sorted(keys_of(store)) == ["a", "c", "d"]


def test_what_was_just_written_stays_even_beside_files_from_the_future(tmp_path: Path) -> None:
    lines = random_lines()
    size_bytes = keep(FeatureStore(tmp_path, limit_bytes=GIB), "a", lines).stat().st_size
    os.utime(tmp_path / "a.lines", (2**32, 2**32))
    store = FeatureStore(tmp_path, limit_bytes=size_bytes)
    keep(store, "b", lines)
    assert keys_of(store) == ["b"]


def test_lines_that_are_evicted_or_cleared_stay_readable_to_whom_they_were_given(
    tmp_path: Path,
) -> None:
    lines, others = random_lines(), random_lines(12)
    store = FeatureStore(tmp_path, limit_bytes=400)
    written = store.write("a", pieces_of(lines), notes={})
    read = read_quietly(store, "a")
    keep(store, "b", others)
    assert keys_of(store) == ["b"]
    store.clear()
    assert read is not None
    assert torch.equal(written, lines)
    assert torch.equal(read, lines)


def test_lines_larger_than_the_limit_are_given_back_and_not_kept(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, limit_bytes=400)
    keep(store, "small", random_lines())
    large = random_lines(1000)
    assert torch.equal(store.write("large", pieces_of(large), notes={}), large)
    assert [path.name for path in tmp_path.iterdir()] == ["small.lines"]


def test_two_writers_of_one_key_do_not_disturb_each_other(store: FeatureStore) -> None:
    lines = random_lines(1000)
    both_write = threading.Barrier(2)
    errors: list[BaseException] = []

    def slowly() -> Iterator[torch.Tensor]:
        for piece in lines.split(10):
            yield piece
            both_write.wait(timeout=10)

    def write() -> None:
        try:
            for _ in range(3):
                assert torch.equal(store.write("a", slowly(), notes={}), lines)
        except BaseException as error:
            errors.append(error)
            both_write.abort()

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in store.folder.iterdir()] == ["a.lines"]
    read = read_quietly(store, "a")
    assert read is not None
    assert torch.equal(read, lines)


@contextmanager
def small_files() -> Iterator[None]:
    """Let the system refuse files of more than 4 KiB, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_without_room_is_an_error_and_leaves_nothing(store: FeatureStore) -> None:
    # No longer than needed: pytest's own output may go to a file.
    with pytest.raises(OSError, match="File too large"), small_files():
        keep(store, "a", random_lines(10_000))
    assert list(store.folder.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "file/features"])
def test_a_folder_that_is_a_file_holds_nothing_and_takes_nothing(
    folder: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    store = FeatureStore(tmp_path / folder, limit_bytes=GIB)
    assert read_quietly(store, "a") is None
    assert store.entries() == []
    assert store.clear() == 0
    with pytest.raises(OSError, match="file"):
        store.write("a", pieces_of(random_lines()), notes={})


def test_a_store_that_may_only_be_read_is_read(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, "a", random_lines())

    def refuse(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert read_quietly(store, "a") is not None


def test_entries_say_what_they_are_the_last_used_first(store: FeatureStore) -> None:
    now = time.time()
    file = keep(store, "a", random_lines(), used_at=now - 10)
    keep(store, "b", random_lines(7, 2, torch.bfloat16), used_at=now - 20)
    first, second = store.entries()
    assert (first.key, second.key) == ("a", "b")
    assert first.size_bytes == file.stat().st_size
    assert first.used_at == pytest.approx(now - 10, abs=0.01)
    assert first.facts == {"rows": 10, "shape": [10, 4], "dtype": "float32"}
    assert second.facts["dtype"] == "bfloat16"


@pytest.mark.parametrize("junk", [b"", b"\0" * 100, b"\n[1]\n", b"\n{}\n", b"\xff\xfe\n{\n"])
def test_junk_is_listed_takes_room_and_goes_like_the_rest(junk: bytes, tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, limit_bytes=400)
    (tmp_path / "junk.lines").write_bytes(junk * 10)
    os.utime(tmp_path / "junk.lines", (1, 1))
    [entry] = store.entries()
    assert (entry.key, entry.facts) == ("junk", {})
    keep(store, "a", random_lines())
    keep(store, "b", random_lines(12))
    assert keys_of(store) == ["b"]


def test_clearing_frees_what_is_kept_and_leaves_what_is_not_the_stores(
    store: FeatureStore,
) -> None:
    size_bytes = keep(store, "a", random_lines()).stat().st_size
    (store.folder / "half.lines.partial").write_bytes(b"123")
    (store.folder / "notes.txt").write_text("mine")
    (store.folder / "folder.txt").mkdir()
    assert store.clear() == size_bytes + 3
    assert sorted(path.name for path in store.folder.iterdir()) == ["folder.txt", "notes.txt"]
    assert store.clear() == 0


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
