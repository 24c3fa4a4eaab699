"""Whole exports of a run."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny_runs import Command


@pytest.mark.slow
def test_an_export_answers_as_the_run_and_its_int8_file_is_compared(
    command: "Command", finished_run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    folder = tmp_path / "exported"
    for _ in range(2):  # the second export replaces the first
        done = command(
            "export", "onnx", finished_run, "--output-dir", folder, "--verify", "--int8", "--json"
        )
        assert done.code == 0, done.errors
    whole, quantized = json.loads(done.output)["files"]
    results = json.loads((finished_run / "all_results.json").read_text())
    assert whole["verification"]["same_labels"] == 1.0
    assert whole["verification"]["largest_logit_difference"] < 1e-4
    assert whole["verification"]["metrics"]["accuracy"] == results["test_accuracy"]
    assert quantized["verification"]["samples"] == results["test_samples"]
    assert quantized["verification"]["largest_logit_difference"] > 0
    assert {one.name for one in folder.iterdir()} >= {
        "model.onnx", "model_quantized.onnx", "config.json", "tokenizer.json"
    }  # fmt: skip


def test_without_the_extra_an_error_names_it(
    command: "Command", finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    done = command("export", "onnx", finished_run)
    done.assert_refused(2, "onnxscript", "pip install onnx")
    assert not (finished_run / "onnx").exists()
