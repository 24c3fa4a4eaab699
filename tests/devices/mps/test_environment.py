import pytest

from finetune.devices.mps.environment import (
    FALLBACK,
    HIGH,
    LOW,
    check_fallback,
    check_math,
    check_watermarks,
    high_ratio,
)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HIGH, raising=False)
    monkeypatch.delenv(LOW, raising=False)


def test_without_variables_the_ratios_are_those_of_pytorch() -> None:
    check = check_watermarks()
    assert check.status == "ok"
    assert check.finding == f"{HIGH}=1.7 by default, {LOW}=1.4 by default"
    assert high_ratio() == 1.7


@pytest.mark.parametrize(
    ("high", "low"), [("1.0", "0.8"), ("1.0", "1.0"), ("1.7", "0"), ("2", "1.4"), ("1e0", ".5")]
)
def test_ratios_that_pytorch_takes_are_ok(
    high: str, low: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HIGH, high)
    monkeypatch.setenv(LOW, low)
    assert check_watermarks().status == "ok"


def test_a_high_watermark_below_the_default_low_one_wants_the_low_one_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HIGH, "0.7")
    check = check_watermarks()
    assert check.status == "failure"
    assert f"{LOW}=1.4 by default" in check.finding
    assert f"set {LOW} to at most 0.7" in check.remedy


@pytest.mark.parametrize(("high", "low"), [("3", "1.4"), ("-1", "0"), ("nan", "0"), ("inf", "0")])
def test_a_high_watermark_that_pytorch_refuses_is_a_failure(
    high: str, low: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HIGH, high)
    monkeypatch.setenv(LOW, low)
    check = check_watermarks()
    assert check.status == "failure"
    assert "takes 0 to 2" in check.finding


@pytest.mark.parametrize(("high", "low"), [("1.0", "1.2"), ("1.7", "-0.1"), ("0", "2.1")])
def test_a_low_watermark_that_pytorch_refuses_is_a_failure(
    high: str, low: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HIGH, high)
    monkeypatch.setenv(LOW, low)
    check = check_watermarks()
    assert check.status == "failure"
    assert f"set {LOW}" in check.remedy


def test_no_limit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIGH, "0.0")
    check = check_watermarks()
    assert check.status == "warning"
    assert "lifts PyTorch's limit" in check.finding
    assert check.remedy == f"unset {HIGH}"


@pytest.mark.parametrize("name", [HIGH, LOW])
@pytest.mark.parametrize("text", ["abc", "", "0,9", "1.5x"])
def test_what_is_no_number_is_a_failure(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    check = check_watermarks()
    assert check.status == "failure"
    assert f"{name}={text}" in check.finding
    assert "is not a number" in check.finding
    assert high_ratio() == (0 if name == HIGH else 1.7)


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


def test_other_arithmetic_than_by_default_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_MPS_FAST_MATH", "0")
    monkeypatch.delenv("PYTORCH_MPS_PREFER_METAL", raising=False)
    assert check_math().status == "ok"
    monkeypatch.setenv("PYTORCH_MPS_PREFER_METAL", "1")
    check = check_math()
    assert check.status == "warning"
    assert "PYTORCH_MPS_FAST_MATH" not in check.finding
    assert check.remedy.startswith("unset PYTORCH_MPS_PREFER_METAL,")
