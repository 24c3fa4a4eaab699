import pytest

from finetune.events import Event, StageStarted, sent_to, stage


def test_a_stage_that_fails_is_not_finished() -> None:
    events: list[Event] = []
    with pytest.raises(ZeroDivisionError), sent_to(events.append), stage("load"):
        raise ZeroDivisionError
    assert events == [StageStarted("load")]
