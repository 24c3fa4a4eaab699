import pytest

from finetune.devices.mps.environment import (
    FALLBACK,
    HIGH,
    LOW,
    check_fallback,
    check_watermarks,
    high_ratio,
)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HIGH, raising=False)
    monkeypatch.delenv(LOW, raising=False)


@pytest.mark.parametrize(
    ("high", "low", "status", "finding"),
    [
        (None, None, "ok", f"{HIGH}=1.7 by default, {LOW}=1.4 by default"),
        ("1e0", ".5", "ok", f"{HIGH}=1e0, {LOW}=.5"),
        ("0.7", None, "failure", f"PyTorch refuses {LOW}=1.4 by default"),
        ("3", "1.4", "failure", f"PyTorch refuses {HIGH}=3: it takes 0 to 2"),
        ("nan", "0", "failure", f"PyTorch refuses {HIGH}=nan"),
        ("1.7", "-0.1", "failure", f"PyTorch refuses {LOW}=-0.1"),
        ("1.5x", None, "failure", f"{HIGH}=1.5x, {LOW}=1.4 by default: one is not a number"),
        ("0.0", None, "warning", "lifts PyTorch's limit"),
    ],
)
def test_ratios_are_judged_as_pytorch_takes_them(
    high: str | None,
    low: str | None,
    status: str,
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ((HIGH, high), (LOW, low)):
        if value is not None:
            monkeypatch.setenv(name, value)
    check = check_watermarks()
    assert check.status == status
    assert finding in check.finding
    assert bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(("high", "ratio"), [(None, 1.7), ("0.8", 0.8), ("1.5x", 0.0)])
def test_the_high_ratio_is_that_of_the_environment(
    high: str | None, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if high is not None:
        monkeypatch.setenv(HIGH, high)
    assert high_ratio() == ratio


@pytest.mark.parametrize(
    ("value", "status"),
    [("0", "ok"), ("1", "warning"), ("2", "warning"), ("1 please", "warning"), ("", "failure"),
     ("true", "failure")],
)  # fmt: skip
def test_the_variable_is_read_as_pytorch_reads_it(
    value: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FALLBACK, value)
    check = check_fallback()
    assert check.status == status
    assert check.remedy == ("" if status == "ok" else f"unset {FALLBACK}")
