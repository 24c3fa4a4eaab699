"""``finetune export`` on real runs."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_runs import run_tiny

if TYPE_CHECKING:
    from tiny_runs import Command


@pytest.mark.slow
def test_onnx_model_predicts_like_the_run_and_int8_is_verified(
    command: "Command", finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    monkeypatch.setattr("finetune.commands.export.MAX_INT8_LOSS", 1)
    folder = tmp_path / "exported"
    export = ("export", "onnx", finished_run, "--output-dir", folder)
    for options in ((), ("--verify", "--int8", "--json")):  # the second replaces the first
        done = command(*export, *options)
        assert done.code == 0, done.errors
    whole, quantized = json.loads(done.output)["files"]
    results = json.loads((finished_run / "all_results.json").read_text())
    assert whole["verification"]["same_labels"] == 1.0
    assert whole["verification"]["largest_logit_difference"] < 1e-4
    assert whole["verification"]["metrics"]["accuracy"] == results["test_accuracy"]
    assert quantized["verification"]["samples"] == 81  # validation rows
    assert 0 < quantized["verification"]["largest_probability_difference"] < 0.5
    assert quantized["verification"]["speed"] > 0
    assert {one.name for one in folder.iterdir()} >= {
        "model.onnx", "model_quantized.onnx", "config.json", "tokenizer.json"
    }  # fmt: skip


@pytest.mark.slow
def test_less_accurate_int8_model_is_not_written(
    command: "Command", finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    from finetune import export

    def compare(*models: Any) -> dict[str, Any]:
        return {"samples": 90, "metrics": {"accuracy": 0.8}, "reference_metrics": {"accuracy": 0.9}}

    monkeypatch.setattr(export, "compare", compare)
    done = command("export", "onnx", finished_run, "--int8", "--output-dir", tmp_path / "exported")
    assert done.code == 0, done.errors
    assert "accuracy falls from 0.9 to 0.8 on 90 rows" in done.errors
    names = {one.name for one in (tmp_path / "exported").iterdir()}
    assert "model.onnx" in names
    assert "model_quantized.onnx" not in names


def test_missing_extra_is_reported_with_its_install_command(
    command: "Command", finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    done = command("export", "onnx", finished_run)
    done.assert_rejected(2, "onnxscript", "pip install onnx")
    assert not (finished_run / "onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("label", "windows"), [("score", True), ("several", False)])
def test_export_reports_steps_that_the_user_must_implement(
    label: str,
    windows: bool,
    command: "Command",
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    monkeypatch.setattr("finetune.commands.export.MAX_INT8_LOSS", 2)
    labels = {"score": lambda n: n * 1e-5, "several": lambda n: ["a|b", "b", "a"][n % 3]}
    rows = [{"text": f"is it {n} ?", "label": labels[label](n)} for n in range(60)]
    options = {"long_texts": "windows", "max_length": 10, "stride": 2} if windows else {}
    run_tiny(tmp_path / "run", model=tiny_folder, data=rows, num_train_epochs=1, **options)
    done = command("export", "onnx", tmp_path / "run", "--int8", "--verify")
    assert done.code == 0, done.errors
    assert ("windows of 10 tokens that overlap by 2" in done.errors) == windows
    assert ("reaches the threshold in config.json" in done.errors) == (label == "several")
    assert ("same labels" in done.output) == (label == "several")
    assert ("of the largest value" in done.output) == (label == "score")
    shown = re.findall(r"largest difference +(\S+)", done.output)
    assert float(shown[0]) < 1e-4 < float(shown[1])  # also if the values are small


def make_labels(kind: str, number: int) -> dict[str, Any]:
    match kind:
        case "score":
            return {"label": number * 1e-5}
        case "several":
            return {"label": ["a|b", "b", "a"][number % 3]}
        case "pair":
            return {"text_pair": f"what {number}", "label": "ab"[number % 2]}
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["score", "several", "pair", "no labels"])
def test_bundle_predicts_like_the_run_without_its_packages(
    kind: str, command: "Command", tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    rows = [{"text": f"is it {n} ?", **make_labels(kind, n)} for n in range(60)]
    options: dict[str, Any] = {"num_train_epochs": 1}
    if kind == "score":
        options |= {"long_texts": "windows", "max_length": 10, "stride": 2}
    elif kind == "no labels":
        options = {"classes": "who,what,how", "num_train_epochs": None, "validation_fraction": None}
        options |= {"learning_rate": None, "batch_size": None, "max_train_samples": None}
    run_tiny(tmp_path / "run", model=tiny_folder, data=rows, **options)
    done = command("export", "bundle", tmp_path / "run", "--zip", "--json")
    assert done.code == 0, done.errors
    exported = json.loads(done.output)
    assert exported["verification"]["same_labels"] == 1
    assert exported["verification"]["largest_difference"] < 1e-4
    bundle = tmp_path / "run" / "bundle"
    names = zipfile.ZipFile(tmp_path / "run" / "bundle.zip").namelist()
    assert {"bundle/model.onnx", "bundle/classify.py", "bundle/requirements.txt"} <= {*names}
    assert "python classify.py" in (bundle / "README.md").read_text()

    texts: list[str | Path] = ["is it 3 ?", "why " * 30, " ", "ü 😀"]
    arguments = [*texts, *(f"--text-pair={n}" for n in range(4) if kind == "pair")]
    if kind == "several":
        arguments = [file := tmp_path / "texts.txt"]
        file.write_text("\ufeff" + "\r\n".join(map(str, texts)), encoding="utf-8", newline="")
    if kind != "score":
        arguments += ["--all-scores", "--min-confidence", "0.5"]
    blocked = "dict.fromkeys(['torch', 'transformers', 'datasets', 'finetune', 'fcntl'])"
    start = f"import runpy, sys; sys.modules.update({blocked}); sys.argv.pop(0)"
    code = f"{start}; runpy.run_path(sys.argv[0], run_name='__main__')"
    classify = [sys.executable, "-I", "-c", code, bundle / "classify.py", *arguments]
    printed = subprocess.check_output(classify, encoding="utf-8")
    done = command("predict", tmp_path / "run", *arguments, "--json", "--device", "cpu")
    assert done.code == 0, done.errors
    ours, theirs = (list(map(json.loads, text.splitlines())) for text in (printed, done.output))
    assert len(ours) == 4
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            is_exact = name in ("text", "text_pair", "label", "labels") or value is None
            assert mine[name] == (value if is_exact else pytest.approx(value, abs=1e-5))


@pytest.mark.slow
def test_bundle_that_predicts_different_labels_is_not_written(
    command: "Command", finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    from finetune import export

    wrong = tmp_path / "classify.py"
    code = export.CLASSIFY_FILE.read_text(encoding="utf-8")
    wrong.write_text(code.replace("logits.argmax()", "logits.argmin()"), encoding="utf-8")
    monkeypatch.setattr(export, "CLASSIFY_FILE", wrong)
    done = command("export", "bundle", finished_run, "--output-dir", tmp_path / "bundle")
    done.assert_rejected(1, "does not predict like the model of the run", "100.0% of the labels")
    assert not (tmp_path / "bundle").exists()
