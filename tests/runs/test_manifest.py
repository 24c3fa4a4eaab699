"""The manifest of a run, and the checks that later commands make with it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prepared_runs import prepare_tiny
from safetensors.torch import load_file, save_file

from finetune.errors import DataError
from finetune.runs.manifest import Manifest, restore_threads


def change_weights(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][7, 7] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def change_tokenizer(model: Path) -> None:
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace('"lowercase": true', '"lowercase": false'))


@pytest.mark.parametrize(
    ("change", "part"), [(change_weights, "weights"), (change_tokenizer, "tokenizer")]
)
def test_changed_model_is_detected(
    change: Callable[[Path], None], part: str, tiny_folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    before = Manifest.of(prepare_tiny(model))
    before.check(Manifest.of(prepare_tiny(tiny_folder)), remedy="none")
    change(model)
    with pytest.raises(DataError, match=f"started: the model's {part} \\("):
        before.check(Manifest.of(prepare_tiny(model)), remedy="none")


@pytest.mark.parametrize(
    ("recorded", "variable", "expected"),
    # The environment variable takes precedence, and there is at most one thread per core.
    [(2, None, 2), (2, "1", 1), (10_000, None, 2), (None, None, 1)],
)
def test_resumed_run_uses_its_original_number_of_threads(
    recorded: int | None, variable: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        restore_threads(recorded)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
