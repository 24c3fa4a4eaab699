import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RunFolderInUse, RunFolderNotEmpty, UsageError
from finetune.runs.folder import RunFolder
from finetune.runs.reserving import (
    check_run_folder,
    delete_previous_run,
    empty_folder,
    lock,
    reserve_folder,
    reserve_new_folder,
    set_aside_previous_run,
)


def make_run(path: Path) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    folder.config_file.write_text("training: {}\n")
    folder.model_folder.mkdir()
    (folder.model_folder / "config.json").write_text("{}")
    return folder


def content_of(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def overwrite(path: Path) -> None:
    with reserve_folder(path, overwrite=True) as folder:
        empty_folder(folder)


def test_new_folder_is_made_with_its_parents_and_kept_once_something_is_in_it(
    tmp_path: Path,
) -> None:
    with reserve_folder(tmp_path / "runs" / "first", overwrite=False) as folder:
        assert content_of(folder.path) == [".lock"]
        folder.config_file.touch()

    assert content_of(tmp_path) == ["runs", "runs/first", "runs/first/config.yaml"]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_new_folder_is_given_back_with_its_parents_when_nothing_came_of_it(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), reserve_folder(tmp_path / "runs" / "first", overwrite=False):
        raise error

    assert content_of(tmp_path) == []


def test_empty_folder_of_the_users_is_not_removed(tmp_path: Path) -> None:
    with reserve_folder(tmp_path, overwrite=False):
        pass

    assert tmp_path.is_dir()


@pytest.mark.parametrize("leftover", [".lock", ".DS_Store"])
def test_a_file_that_does_not_count_leaves_a_folder_empty(tmp_path: Path, leftover: str) -> None:
    (tmp_path / leftover).touch()

    with reserve_folder(tmp_path, overwrite=False) as folder:
        assert folder == RunFolder(tmp_path)


def test_folder_of_a_run_is_refused_with_the_three_ways_out(tmp_path: Path) -> None:
    make_run(tmp_path)

    with pytest.raises(RunFolderNotEmpty) as refusal, reserve_folder(tmp_path, overwrite=False):
        pass

    for flag in ("--resume-from-checkpoint", "--overwrite", "--output-dir"):
        assert flag in refusal.value.remedy


def test_previous_run_stays_until_the_new_one_is_done_with_it(tmp_path: Path) -> None:
    make_run(tmp_path)

    with reserve_folder(tmp_path, overwrite=True) as folder:
        set_aside_previous_run(folder)
        assert content_of(tmp_path) == [
            ".lock", "previous", "previous/config.yaml", "previous/model",
            "previous/model/config.json",
        ]  # fmt: skip
        folder.config_file.touch()
        delete_previous_run(folder)

    assert content_of(tmp_path) == ["config.yaml"]


def test_previous_run_is_put_back_where_the_new_one_leaves_nothing(tmp_path: Path) -> None:
    before = content_of(make_run(tmp_path).path)

    def fail() -> None:
        with reserve_folder(tmp_path, overwrite=True) as folder:
            set_aside_previous_run(folder)
            folder.config_file.touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert content_of(tmp_path) == before


def test_previous_run_outlives_new_ones_that_were_killed_without_a_model(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    for _ in range(3):
        set_aside_previous_run(folder)
        folder.config_file.write_text("killed")
    assert (folder.previous_run / "model" / "config.json").is_file()

    folder.model_folder.mkdir()
    set_aside_previous_run(folder)

    assert (folder.previous_run / "config.yaml").read_text() == "killed"


def test_earlier_run_stays_where_the_one_to_overwrite_it_fails(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")

    with pytest.raises(KeyError), reserve_folder(folder.path, overwrite=True):
        raise KeyError

    assert (folder.model_folder / "config.json").is_file()


def test_overwrite_empties_the_folder_of_a_run_killed_while_it_wrote_its_first_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / "config.yaml.partial").write_text("train")

    overwrite(tmp_path / "run")

    assert content_of(tmp_path / "run") == []


@pytest.mark.parametrize("may_overwrite", [True, False])
@pytest.mark.parametrize(
    "names", [["thesis.tex"], ["config.yaml", "main.py"], [".lock", "notes"], ["model"]]
)
def test_folder_with_files_of_others_is_never_touched(
    tmp_path: Path, names: list[str], may_overwrite: bool
) -> None:
    for name in names:
        (tmp_path / name).write_text("dear")

    with (
        pytest.raises(RunFolderNotEmpty) as refusal,
        reserve_folder(tmp_path, overwrite=may_overwrite),
    ):
        pass

    assert "--overwrite" not in refusal.value.remedy
    assert content_of(tmp_path) == sorted(names)


def test_overwrite_removes_a_link_and_keeps_what_it_points_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("dear")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    (run / "model").symlink_to(elsewhere)

    overwrite(run)

    assert content_of(run) == []
    assert (elsewhere / "weights").read_text() == "dear"


def test_check_changes_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    before = content_of(tmp_path)

    check_run_folder(folder, overwrite=True)
    check_run_folder(RunFolder(tmp_path / "new" / "run"), overwrite=False)
    with pytest.raises(RunFolderNotEmpty):
        check_run_folder(folder, overwrite=False)

    assert content_of(tmp_path) == before


def test_run_that_is_going_on_is_not_overwritten(tmp_path: Path) -> None:
    folder = make_run(tmp_path)

    with lock(folder), pytest.raises(RunFolderInUse):
        overwrite(tmp_path)

    assert folder.config_file.exists()


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("dear")

    with pytest.raises(RunFolderNotEmpty, match="is a file"):
        overwrite(tmp_path / "run")


@pytest.mark.parametrize(
    "reserve",
    [
        lambda path: reserve_folder(path / "run", overwrite=False),
        lambda path: reserve_new_folder(path, "run"),
    ],
)
def test_folder_that_can_not_be_made_is_refused(
    tmp_path: Path, reserve: Callable[..., Any]
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match="can't be made"), reserve(tmp_path / "file"):
        pass


def test_link_to_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")

    with (
        pytest.raises(UsageError, match="can't be made"),
        reserve_folder(tmp_path / "run", overwrite=False),
    ):
        pass


def test_folders_reserved_at_once_differ(tmp_path: Path) -> None:
    all_hold_one = threading.Barrier(8)

    def hold(number: int) -> str:
        with reserve_new_folder(tmp_path / "runs", "trec") as folder:
            all_hold_one.wait(timeout=30)
            folder.config_file.write_text(str(number))
            return folder.path.name

    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(hold, range(8)))

    assert sorted(names) == ["trec", *(f"trec-{number}" for number in range(2, 9))]
    assert [(tmp_path / "runs" / name / "config.yaml").read_text() for name in names] == [
        str(number) for number in range(8)
    ]


def test_a_parent_that_another_process_gives_back_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, parents = os.mkdir, [tmp_path / "runs"]

    def give_back_before(path: Path, mode: int = 0o777) -> None:
        if Path(path).name == "trec" and parents:
            parents.pop().rmdir()
        mkdir(path, mode)

    parents[0].mkdir()
    monkeypatch.setattr(os, "mkdir", give_back_before)
    with reserve_new_folder(tmp_path / "runs", "trec") as folder:
        assert folder.path.is_dir()


@pytest.mark.slow
def test_a_thousand_runs_started_in_one_folder_share_none(tmp_path: Path) -> None:
    def start(number: int) -> Path:
        with reserve_new_folder(tmp_path / "runs", "trec") as folder:
            folder.config_file.open("x").close()
            return folder.path

    with ThreadPoolExecutor(64) as threads:
        assert len(set(threads.map(start, range(1_000)))) == 1_000


def test_second_lock_is_refused_at_once_and_the_next_one_is_given(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    with lock(folder), pytest.raises(RunFolderInUse), lock(folder):
        pass
    with lock(folder):
        assert content_of(tmp_path) == [".lock"]

    assert content_of(tmp_path) == []


def test_lock_is_released_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock(RunFolder(tmp_path)):
        raise KeyError

    assert content_of(tmp_path) == []


def test_lock_of_a_killed_process_stops_nobody(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from finetune.runs.reserving import *\n"
        f"with lock(RunFolder(Path({str(tmp_path)!r}))):\n"
        "    print('locked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()

    with pytest.raises(RunFolderInUse), lock(RunFolder(tmp_path)):
        pass
    process.kill()
    process.communicate()

    with lock(RunFolder(tmp_path)):
        pass
