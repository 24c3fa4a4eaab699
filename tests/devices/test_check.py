import pytest

from finetune.devices.check import FALLBACK, HIGH, PREFER_METAL, Check, check_variables, high_ratio


def check_of(name: str) -> Check:
    [check] = [one for one in check_variables() if one.name == name]
    return check


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
    check = check_of("mps_watermarks")
    assert check.status == status
    assert ("lifts PyTorch's limit" in check.finding) == bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize("variable", [FALLBACK, PREFER_METAL])
@pytest.mark.parametrize(("value", "status"), [("0", "ok"), ("1", "warning")])
def test_what_makes_a_gpu_slow_is_a_warning(
    variable: str, value: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    check = check_of("mps_fallback" if variable == FALLBACK else "mps_prefer_metal")
    assert check.status == status
    assert check.remedy == ("" if status == "ok" else f"unset {variable}")
