import pytest

from finetune.events import Event, StageStarted, stage


def test_a_stage_that_fails_is_not_finished() -> None:
    events: list[Event] = []
    with pytest.raises(ZeroDivisionError), stage("load", events.append):
        raise ZeroDivisionError
    assert events == [StageStarted("load")]
