import pytest

import finetune
from finetune.cli import python_api
from finetune.cli.python_api import shown_live
from finetune.events import Emit, Event, Info, ignore


@shown_live
def work(subject: str, *, emit: Emit = ignore) -> str:
    """Do some work."""
    emit(Info(f"working on {subject}"))
    return subject


def test_where_nobody_watches_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert work("it") == "it"
    assert capsys.readouterr() == ("", "")


def test_where_someone_watches_events_are_shown_unless_the_caller_takes_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_api, "is_watched", lambda: True)
    work("it")
    assert capsys.readouterr() == ("", "working on it\n")
    emitted: list[Event] = []
    work("it", emit=emitted.append)
    work("it", progress=False)
    assert emitted == [Info("working on it")]
    assert capsys.readouterr() == ("", "")


def test_progress_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    work("it", progress=True)
    assert capsys.readouterr().err == "working on it\n"


def test_an_interactive_session_completes_the_functions() -> None:
    assert set(finetune.__all__) <= set(dir(finetune))


@pytest.mark.parametrize("name", finetune.__all__)
def test_the_functions_of_the_package_keep_their_name_and_help(name: str) -> None:
    function = getattr(finetune, name)
    assert function.__name__ == name
    assert "Args:" in function.__doc__
