"""Untrusted files are harmless. Their code is not executed, and control characters are escaped."""

import csv
import io
import pickle
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tiny_runs import Outcome, flags

from finetune.commands.main import main

TOKEN = "hf_thisMustNotBeSeenAnywhere"
TITLE, CLEAR, OVERRIDE, ISOLATE = "\x1b]0;owned\x07", "\x9b2J", "\u202e", "\u2067"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u2028-\u202e\u2066-\u2069]")
MARKUP = "<script>alert(1)</script>"
CLASSES = (f"a{TITLE}{MARKUP}", f"b{OVERRIDE}![x](https://evil.example/x.png)|`")
TEXT_COLUMN, LABEL_COLUMN = f"text{CLEAR}", f"label{ISOLATE}<b>"
EVIL_CODE = "raise SystemExit('untrusted code runs')"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

# While the list isn't empty, code in these folders, pickles and remote connections are forbidden.
watched_folders: list[Path] = []


class ForbiddenError(BaseException):
    """An error that no handler catches."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not watched_folders:
        return
    if event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        is_allowed = arguments[1][0] in LOOPBACK
    elif event == "socket.getaddrinfo":
        is_allowed = arguments[0] in LOOPBACK
    elif event == "exec":
        place = getattr(arguments[0], "co_filename", "")
        is_allowed = not any(str(folder) in place for folder in watched_folders)
    else:
        is_allowed = event not in ("pickle.find_class", "os.system")
    if not is_allowed:
        raise ForbiddenError(event, *arguments)


sys.addaudithook(_watch)


def _forbid(*_: Any, **__: Any) -> NoReturn:
    raise ForbiddenError("a pickle is read")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Path]:
    """The working directory of the main commands, with an untrusted table and model."""
    folder = tmp_path_factory.mktemp(f"here{OVERRIDE}<i>")
    model = shutil.copytree(tiny_folder, folder / "model")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    for name in ("modeling_evil", "torch", "numpy", "sitecustomize"):
        for place in (folder, model):
            (place / f"{name}.py").write_text(EVIL_CODE)
    with (folder / f"rows{CLEAR}<i>`.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([TEXT_COLUMN, LABEL_COLUMN])
        writer.writerows(
            (f"{MARKUP} {TITLE}{OVERRIDE} text number {n} {CLEAR}", CLASSES[n % 2])
            for n in range(40)
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_TOKEN", TOKEN)
        for name in ("load", "loads", "Unpickler", "_load", "_loads"):
            patch.setattr(pickle, name, _forbid)
        patch.setattr(torch, "load", _forbid)
        watched_folders.append(folder)
        yield folder
        watched_folders.clear()


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    """The outcome of each main command."""
    [table] = (one.name for one in folder.glob("*.csv"))
    columns = ("--text-column", TEXT_COLUMN, "--label-column", LABEL_COLUMN)
    training = flags(data=table, model="model", num_train_epochs=1)
    lines = {
        "init": ("init", table, "--output", "mine.yaml"),
        "config": ("config", "show", "--config", "mine.yaml"),
        "check": ("data", "check", "--data", table, *columns),
        "dry run": ("run", *training, *columns, "--dry-run"),
        "run": ("run", *training, *columns, "--output-dir", "out", "--freeze-core"),
        "evaluate": ("evaluate", "out"),
        "predict": ("predict", "out", "--data", table),
        "predict JSON": ("predict", "out", "--data", table, "--json", "--all-scores"),
        "all scores": ("predict", "out", "--data", table, "--all-scores"),
        "cache": ("cache",),
        "error": ("data", "check", "--data", f"none{TITLE}{OVERRIDE}.csv"),
        "other label": ("data", "check", "--data", table, "--label-column", f"x{TITLE}", "--debug"),
    }
    return {name: _run(*line) for name, line in lines.items()}


def _run(*arguments: str) -> Outcome:
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            main(list(arguments))
        except SystemExit as left:
            code = int(left.code or 0)
    return Outcome(code, output.getvalue(), errors.getvalue())


def test_main_commands_avoid_pickle_local_code_and_the_network(
    outcomes: dict[str, Outcome],
) -> None:
    failed = {name: one.errors for name, one in outcomes.items() if one.code}
    assert failed.keys() == {"error", "other label"}, failed


def test_output_contains_only_escaped_control_characters(outcomes: dict[str, Outcome]) -> None:
    for name, one in outcomes.items():
        errors = one.errors.replace("\rLoading weights", "")  # progress bar of transformers
        assert not OBEYED.findall(one.output + errors), name
    assert "\\u001b]0;owned" in outcomes["predict"].output


def test_pages_escape_untrusted_markup(folder: Path, outcomes: dict[str, Outcome]) -> None:
    for page in ("out/report.html", "out/model/README.md"):
        text = (folder / page).read_text(encoding="utf-8")
        assert "alert(1)" in text
        assert "<script>alert" not in text
        assert not OBEYED.findall(text), page
    assert "![x]" not in (folder / "out/model/README.md").read_text(encoding="utf-8")


def test_token_is_absent_from_output_and_files(folder: Path, outcomes: dict[str, Outcome]) -> None:
    assert not [name for name, one in outcomes.items() if TOKEN in one.output + one.errors]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_audit_hook_detects_pickles_code_and_connections(folder: Path) -> None:
    with pytest.raises(ForbiddenError):
        pickle._Unpickler(io.BytesIO(b"cbuiltins\nprint\n.")).load()  # type: ignore[attr-defined]
    with pytest.raises(ForbiddenError):
        exec(compile("", str(folder / "torch.py"), "exec"))
    with pytest.raises(ForbiddenError), socket.socket() as other:
        other.connect(("192.0.2.1", 80))
