import signal
import time

import pytest

from finetune.training.interruption import Stopped, stop_on_signal


def test_repeated_signal_from_a_launcher_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 7.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with stop_on_signal(apart_seconds=1.0) as should_stop:
        signal.raise_signal(signal.SIGTERM)
        now = 7.9
        signal.raise_signal(signal.SIGTERM)
        assert should_stop.number
        now = 8.0
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)


def test_signal_ignored_by_nohup_remains_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal(at_once=True), stop_on_signal() as should_stop:
            signal.raise_signal(signal.SIGHUP)
            assert not should_stop.number
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
