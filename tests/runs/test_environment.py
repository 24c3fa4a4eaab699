from pathlib import Path

import pytest
import torch

from finetune.files import write_json
from finetune.runs.environment import restore_threads


@pytest.mark.parametrize(
    ("recorded", "variable", "expected"),
    [
        pytest.param({"threads": 2}, None, 2, id="as recorded"),
        pytest.param({"threads": 2}, "1", 1, id="the variable goes first"),
        pytest.param({"threads": 10_000}, None, 2, id="at most one for each core"),
        pytest.param({}, None, 1, id="nothing recorded"),
    ],
)
def test_a_resumed_run_computes_with_the_threads_it_began_with(
    recorded: dict[str, int],
    variable: str | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    write_json(tmp_path / "environment.json", recorded)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        restore_threads(tmp_path / "environment.json")
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
