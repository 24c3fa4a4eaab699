"""Runs with LoRA."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Command, run_tiny

from finetune.model import lora

LORA: dict[str, Any] = {"lora_rank": 4, "contrastive": "off", "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A finished run with LoRA. Tests don't change it."""
    path = tmp_path_factory.mktemp("lora") / "run"
    run_tiny(path, model=tiny_folder, **LORA)
    return path


def test_adapter_option_pushes_only_the_adapter(
    run: Path, finished_run: Path, command: Command
) -> None:
    pushed = command("push", run, "ada/demo", "--dry-run", "--adapter").output
    assert "adapter_model.safetensors" in pushed
    assert " model.safetensors" not in pushed
    command("push", finished_run, "ada/demo", "--dry-run", "--adapter").assert_rejected(
        2, "no weights", "drop --adapter"
    )


def test_missing_peft_is_reported_with_its_install_command(
    tiny_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "is_installed", lambda: False)
    common = ("--data", "questions", "--model", tiny_folder, "--output-dir", tmp_path / "run")

    command("run", *common, "--lora-rank", "8").assert_rejected(2, "pip install peft")
