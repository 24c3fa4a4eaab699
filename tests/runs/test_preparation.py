"""The preparation of a run, and reasons to reject it."""

from pathlib import Path
from typing import Any

import pytest
from prepared_runs import prepare_tiny
from tiny_runs import run_tiny

from finetune.errors import (
    ConfigurationError,
    DataNotFoundError,
    FinetuneError,
    ModelNotFoundError,
    UsageError,
)
from finetune.events import Event, WarningMessage, sent_to


def test_a_longer_text_than_the_model_has_positions_for_asks_for_nothing_impossible(
    tiny_folder: Path,
) -> None:
    emitted: list[Event] = []
    with sent_to(emitted.append):
        prepare_tiny(tiny_folder, max_length=128)
    warnings = [event for event in emitted if isinstance(event, WarningMessage)]
    assert "64 tokens" in warnings[0].message  # as many as the model has positions
    assert "--max-length" not in warnings[0].remedy


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "no/such/folder"}, ModelNotFoundError),
        ({"data": "trec", "data_dir": "no/such/folder"}, DataNotFoundError),
        ({"data": "nothing"}, UsageError),
        ({"label": "label-fine"}, UsageError),
        ({"train_layers": 4}, ConfigurationError),
        ({"validation_fraction": 1e-6}, FinetuneError),
        ({"precision": "fp16"}, ConfigurationError),
    ],
)
def test_a_run_that_can_not_begin_leaves_no_folder(
    options: dict[str, Any], error: type[FinetuneError], tiny_folder: Path, tmp_path: Path
) -> None:
    model = Path(options.get("model", tiny_folder))
    others = {name: value for name, value in options.items() if name != "model"}
    with pytest.raises(error) as raised:
        run_tiny(tmp_path / "runs" / "first", model=model, **others)
    assert raised.value.remedy
    assert list(tmp_path.iterdir()) == []
