import ast
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
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
    """Do some work."""
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
def test_events_are_shown_to_those_who_watch_and_warnings_reach_all(
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


def test_the_package_offers_its_functions_and_nothing_that_is_not_there() -> None:
    assert set(finetune.__all__) <= set(dir(finetune))
    with pytest.raises(AttributeError, match="fine_tune"):
        finetune.fine_tune  # noqa: B018


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": -1}, "learning_rate is -1, but should be greater than 0"),
        ({"train_layers": 2, "freeze_core": True}, "train_layers and freeze_core can't be"),
        ({"batch_sze": 8}, "there is no option batch_sze"),
        ({"seeds": 1}, "seeds is 1, but should be"),
    ],
)
def test_errors_name_arguments_and_no_flags(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        finetune.run(**options)
    shown = "\n".join([str(refused.value), *refused.value.__notes__])
    assert words in shown
    assert "--" not in shown.replace("--help", "")


def test_help_and_notebooks_see_every_option() -> None:
    shown = signature(finetune.run).parameters
    assert {"config", "freeze_core", "progress"} <= set(shown)
    assert shown["learning_rate"].default is None
    assert shown["max_length"].default == ModelConfig.max_length
    assert "label_column" in signature(finetune.evaluate).parameters


def test_type_checkers_see_the_functions_as_they_are() -> None:
    stub = ast.parse((Path(finetune.__file__).with_suffix(".pyi")).read_text())
    functions = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    assert {one.name for one in functions} == set(finetune.__all__)
    for one in functions:
        names = {argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)}
        names |= {one.args.vararg.arg} if one.args.vararg else set()
        shown = set(signature(getattr(finetune, one.name)).parameters)
        assert names <= shown, one.name
        assert shown - names <= (set(OPTIONS) if one.args.kwarg else set()), one.name


def test_type_checkers_see_the_options_of_the_schema() -> None:
    assert STUB.read_text(encoding="utf-8") == make_stub(), "try: make types"
