import pytest

from finetune.devices.check import (
    FALLBACK,
    HIGH,
    check_fallback,
    check_watermarks,
    high_ratio,
)


@pytest.mark.parametrize(
    ("high", "ratio", "status"),
    [(None, 1.7, "ok"), ("0.8", 0.8, "ok"), ("0.0", 0.0, "warning"), ("1.5x", 0.0, "warning")],
)
def test_a_lifted_limit_is_a_warning(
    high: str | None, ratio: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HIGH, raising=False)
    if high is not None:
        monkeypatch.setenv(HIGH, high)
    assert high_ratio() == ratio
    check = check_watermarks()
    assert check.status == status
    assert ("lifts PyTorch's limit" in check.finding) == bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(("value", "status"), [("0", "ok"), ("1", "warning")])
def test_operators_that_run_on_the_cpu_unseen_are_a_warning(
    value: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FALLBACK, value)
    check = check_fallback()
    assert check.status == status
    assert check.remedy == ("" if status == "ok" else f"unset {FALLBACK}")
