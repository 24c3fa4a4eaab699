"""Runs without pictures, which take a third of a tiny run's time; other rooms draw theirs."""

import pytest


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.report.page.draw_curves", lambda rows, figures: "<svg></svg>")
