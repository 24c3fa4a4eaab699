import time

import pytest

from finetune.commands.running import Count, clock
from finetune.events import Event, StageStarted, stage


def test_the_time_left_is_that_of_the_pace_since_the_count_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    count = Count(first=10, started=now)
    assert count.left_seconds() is None
    now = 120.0
    count.move(20, 40)
    now = 121.0
    assert count.left_seconds() == 39.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (59.6, "1:00"), (3599.6, "1:00:00"), (90061, "25:01:01")],
)
def test_a_time_is_as_precise_as_people_read_it(seconds: float, words: str) -> None:
    assert clock(seconds) == words


def test_a_stage_that_fails_is_not_finished() -> None:
    events: list[Event] = []
    with pytest.raises(ZeroDivisionError), stage("load", events.append):
        raise ZeroDivisionError
    assert events == [StageStarted("load")]
