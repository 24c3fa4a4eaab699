from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import have_same_bits, run_tiny, weights_of

from finetune.devices.cpu import CpuDevice
from finetune.devices.threads import ThreadChoice
from finetune.events import Event, Info
from finetune.files import read_json


def test_a_run_says_how_many_threads_it_takes_and_trains_the_same(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path
) -> None:
    logits = []

    def choose(device: CpuDevice, work: Callable[[], object]) -> ThreadChoice:
        logits.append(work())
        return ThreadChoice(1, {2: 0.02, 1: 0.01}, busy_share=0.5)

    monkeypatch.setattr(CpuDevice, "choose_threads", choose)
    events: list[Event] = []
    run_tiny(tmp_path / "chosen", model=tiny_folder, emit=events.append)
    assert len(logits) == 1
    assert any(isinstance(e, Info) and e.message.startswith("CPU threads: 1, ") for e in events)
    [choice] = read_json(tmp_path / "chosen" / "all_results.json")["details"]["choices"]
    assert (choice["subject"], choice["value"]) == ("CPU threads", "1")
    assert choice["measured"] == {"2": 20.0, "1": 10.0}
    assert have_same_bits(weights_of(finished_run), weights_of(tmp_path / "chosen"))
