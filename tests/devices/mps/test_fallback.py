import pytest

from finetune.devices.mps.fallback import FALLBACK, check_fallback


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


def test_without_the_variable_nothing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK, raising=False)
    assert check_fallback().status == "ok"
