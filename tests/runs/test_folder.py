"""Creating, locking and opening run folders."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from finetune.config.schema import Config, DataConfig
from finetune.errors import NotARunError, UsageError
from finetune.runs.folder import RunFolder, SeveralFolder, open_run_folder
from finetune.runs.request import RunRequest


def make_run(path: Path, content: str = "training: {}\n") -> RunFolder:
    folder = RunFolder(path)
    with folder.make(overwrite=False):
        folder.config_file.write_text(content)
        folder.model_folder.mkdir()
        folder.model_config_file.write_text("{}")
    return folder


def list_entries(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_new_folder_and_its_parents_are_deleted_after_an_error(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), RunFolder(tmp_path / "runs" / "first").make(overwrite=False):
        raise error

    assert list_entries(tmp_path) == []


@pytest.mark.parametrize("runs", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_folders_created_concurrently_have_different_names(
    tmp_path: Path, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = RunRequest(Config(data=DataConfig(data="trec")))
    workers = min(runs, 64)
    all_hold_one = threading.Barrier(workers)

    def create(number: int) -> str:
        with request.lock() as folder:
            if number < workers:
                all_hold_one.wait(timeout=30)
            folder.config_file.open("x").close()
            return folder.path.name

    with ThreadPoolExecutor(workers) as threads:
        names = {*threads.map(create, range(runs))}

    name = request.default_name
    assert names == {name, *(f"{name}-{number}" for number in range(2, runs + 1))}


def test_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    make_run(tmp_path)
    code = (
        "import time; from pathlib import Path; from finetune.runs.folder import RunFolder\n"
        f"with RunFolder(Path({str(tmp_path)!r})).lock():\n"
        "    print('locked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()

    with pytest.raises(UsageError), RunFolder(tmp_path).lock():
        pass
    process.kill()
    process.communicate()

    with RunFolder(tmp_path).lock():
        pass


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"seeds": [], "best": null}', '{"seeds": ["a"], "best": null}',
     '{"seeds": [1], "best": "../other"}', '{"seeds": [1], "best": []}'],
)  # fmt: skip
def test_invalid_table_of_runs_is_reported(content: str, tmp_path: Path) -> None:
    SeveralFolder(tmp_path, "seeds").table_file.write_text(content)
    with pytest.raises(NotARunError, match=r"seeds\.json is missing or can't be read"):
        open_run_folder(tmp_path)


@pytest.mark.parametrize(
    ("data", "name"),
    [("some/rows.csv", "rows"), ("hub:acme/rows@refs/pr/1", "rows"), ("trec", "trec")],
)
def test_default_folder_name_contains_the_data_source(data: str, name: str) -> None:
    config = Config(data=DataConfig(data=data))
    assert RunRequest(config).default_name == f"{name}-bert-base-uncased-full"
