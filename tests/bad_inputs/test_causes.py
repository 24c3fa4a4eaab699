"""Errors about the bad inputs in ``cases.txt`` state the cause and are never "unexpected"."""

import errno
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import QUICK, Command

import finetune
from finetune.errors import (
    ConfigurationError,
    FinetuneError,
    InterruptionError,
    ProcessLostError,
    explain,
    explained,
)

CASES = [
    line.split(" | ")
    for line in (Path(__file__).parent / "cases.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, finished_run: Path) -> Path:
    """A folder with the files that the cases use. The cases don't change it."""
    place = tmp_path_factory.mktemp("place")
    for folder in ("folder", "folder.csv"):
        (place / folder).mkdir()
    (place / "loop").symlink_to("loop")
    (place / "gone").symlink_to("nowhere")
    rows = "".join(f"text number {number},{'ab'[number % 2]}\n" for number in range(40))
    (place / "rows.csv").write_text(f"text,label\n{rows}")
    (place / "notes.txt").write_text("one line\nanother one")
    (place / "list.yaml").write_text("- a\n- b\n")
    for copy in ("RUN", "COPY"):
        shutil.copytree(finished_run, place / copy)
    return place


def list_files(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(one), one.lstat().st_mtime_ns) for one in folder.rglob("*"))


@pytest.mark.parametrize(("line", "code", "cause"), CASES, ids=[line for line, *_ in CASES])
def test_error_states_the_cause(
    line: str, code: str, cause: str, command: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = list_files(place)
    outcome = command(*shlex.split(line))
    outcome.assert_rejected(int(code), cause)
    assert "error: unexpected" not in outcome.errors
    assert list_files(place) == before
    assert os.listdir() == os.listdir(place)


ARGUMENTS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("predict", ("", ["text"]), {}, "run is empty"),
    ("predict", ("RUN", ["text"]), {"device": "tpu"}, "device is 'tpu'"),
    ("predict", ("RUN", ["text"]), {"min_confidence": "0.5"}, "min_confidence is '0.5'"),
    ("evaluate", ("RUN",), {"split": 1}, "split is 1"),
    ("evaluate", ("RUN",), {"evaluate_metric": ["f1"]}, "evaluate_metric is"),
    ("compare", ("", ""), {}, "runs is empty"),
    ("compare", ("RUN", "COPY"), {"reference": "worst"}, "reference is 'worst'"),
    ("compare", ("RUN", "COPY"), {"limit": -1}, "limit is -1"),
    ("find_batch", (), {"fresh": None}, "fresh is None"),
    ("run", (3,), {}, "file is 3"),
    ("run", (), {"seeds": "2"}, "seeds is '2'"),
    ("run", (), {"assignments": "training.seed=1"}, "assignments is 'training.seed=1'"),
    ("run", (), {"data": ""}, "data is empty"),
    ("run", (), {"seed": None, "freeze_core": "perhaps"}, "freeze_core is 'perhaps'"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "cause"), ARGUMENTS)
def test_argument_of_the_wrong_type_is_reported(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], cause: str
) -> None:
    with pytest.raises(ConfigurationError, match=cause):
        getattr(finetune, name)(*arguments, **options)


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOENT, 2), (errno.EACCES, 2), (errno.ENOSPC, 1), (errno.EIO, 1)]
)
def test_system_error_is_explained(number: int, code: int) -> None:
    explained = explain(OSError(number, os.strerror(number), "here"))
    assert explained is not None
    assert (explained.message, explained.exit_code) == (f"here: {os.strerror(number)}", code)


def test_exception_without_a_message_is_reported_by_class_name() -> None:
    lost = pytest.raises(ProcessLostError, match=r"no longer answers \(RuntimeError\)")
    with lost, explained("joined processes"):
        raise RuntimeError
    with pytest.raises(ZeroDivisionError), explained("joined processes"):  # a bug in this package
        raise ZeroDivisionError


def test_python_api_raises_finetune_errors_for_system_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FinetuneError, match=r"symbolic links|Symlink loop"):
        finetune.evaluate(tmp_path / "loop")
    with pytest.raises(FinetuneError, match="home directory"):
        finetune.predict("~nosuchuser/run", ["text"])


def test_ctrl_c_in_python_raises_keyboard_interrupt(tiny_folder: Path, tmp_path: Path) -> None:
    options = {**QUICK, "model": str(tiny_folder), "output_dir": str(tmp_path / "run")}
    with pytest.raises(KeyboardInterrupt) as stopped:
        finetune.run(**options, emit=lambda event: signal.raise_signal(signal.SIGINT))
    assert not isinstance(stopped.value, Exception)
    assert isinstance(stopped.value, InterruptionError)
    assert stopped.value.exit_code == 130


def test_closed_stdin_is_reported(
    command: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    command("predict", finished_run).assert_rejected(2, "standard input is closed")


def test_tilde_is_expanded_after_an_equals_sign(
    command: Command, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    missing = f"file not found: {tmp_path}/no.csv"
    command("predict", finished_run, "--data=~/no.csv").assert_rejected(3, missing)
