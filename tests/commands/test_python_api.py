import ast
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from option_types import STUB, make_stub

import finetune
from finetune.commands import console
from finetune.commands.python_api import as_python
from finetune.config.schema import OPTIONS, ModelConfig
from finetune.errors import UsageError
from finetune.events import Event, Info, WarningMessage, emit, ignore
from finetune.tasks.base import Predictions


@as_python
def work(subject: str) -> Predictions:
    """Emit events about a subject."""
    emit(Info(f"working on {subject}"))
    emit(WarningMessage(f"{subject} is odd", remedy="give --progress"))
    emit(Info("--label-column or --no-header"))
    return Predictions()


@pytest.mark.parametrize(
    ("options", "is_watched", "shown"),
    [
        ({}, False, ""),
        ({}, True, "working on it\nlabel_column or header=False\n"),
        ({"progress": True}, False, "working on it\nlabel_column or header=False\n"),
        ({"progress": False}, True, ""),
        ({"emit": ignore}, True, ""),
    ],
)
def test_progress_is_shown_interactively_and_warnings_always(
    options: dict[str, Any],
    is_watched: bool,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "is_watched", lambda: is_watched)
    with pytest.warns(UserWarning, match=r"^it is odd \(give progress\)$") as warned:
        results = work("it", **options)
    assert warned[0].filename == __file__
    assert results.warnings == ("it is odd (give progress)",)
    assert capsys.readouterr() == ("", shown)
    emitted: list[Event] = []
    with pytest.warns(UserWarning, match="is odd"):
        work("it", emit=emitted.append)
    assert [type(event) for event in emitted] == [Info, WarningMessage, Info]


CHANGE_TORCH = """
from finetune.commands.python_api import as_python

@as_python
def change_torch(subject: str) -> bool:
    import torch
    torch.manual_seed(42)
    torch.rand(3)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
"""


def test_call_restores_the_state_of_torch() -> None:
    names: dict[str, Any] = {"__name__": "user"}
    exec(CHANGE_TORCH, names)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    with torch.inference_mode():
        assert names["change_torch"]("it")
        assert torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()) == (threads, True)


@pytest.mark.slow
def test_first_call_leaves_torch_in_its_default_state() -> None:
    script = f"{CHANGE_TORCH}\nimport sys\nprint('torch' in sys.modules)\nchange_torch('it')"
    script += "\nimport torch\nprint(torch.initial_seed(), torch.get_num_threads())"
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    was_imported, seed, threads = output.split()
    assert (was_imported, threads) == ("False", os.environ["OMP_NUM_THREADS"])
    assert seed != "42"


def test_package_lists_its_functions_and_rejects_unknown_attributes() -> None:
    assert set(finetune.__all__) <= set(dir(finetune))
    with pytest.raises(AttributeError, match="fine_tune"):
        finetune.fine_tune  # noqa: B018


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": -1}, "learning_rate is -1, but should be greater than 0"),
        ({"train_layers": 2, "freeze_core": True}, "train_layers and freeze_core can't be"),
        ({"batch_sze": 8}, "unknown option batch_sze"),
        ({"seeds": 1}, "seeds is 1, but should be"),
    ],
)
def test_errors_use_argument_names_instead_of_flags(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        finetune.run(**options)
    shown = "\n".join([str(raised.value), *raised.value.__notes__])
    assert words in shown
    assert "--" not in shown.replace("--help", "")


def test_signatures_list_all_options() -> None:
    shown = signature(finetune.run).parameters
    assert {"config", "freeze_core", "progress"} <= set(shown)
    assert shown["learning_rate"].default is None
    assert shown["max_length"].default == ModelConfig.max_length
    assert "label_column" in signature(finetune.evaluate).parameters


def test_stub_signatures_match_the_functions() -> None:
    stub = ast.parse((Path(finetune.__file__).with_suffix(".pyi")).read_text())
    functions = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    assert {one.name for one in functions} == set(finetune.__all__)
    for one in functions:
        names = {argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)}
        names |= {one.args.vararg.arg} if one.args.vararg else set()
        shown = set(signature(getattr(finetune, one.name)).parameters)
        assert names <= shown, one.name
        assert shown - names <= (set(OPTIONS) if one.args.kwarg else set()), one.name


def test_stub_lists_the_options_in_the_schema() -> None:
    assert STUB.read_text(encoding="utf-8") == make_stub(), "try: make types"
