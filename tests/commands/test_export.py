"""``finetune export`` on real runs."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_runs import run_tiny

import finetune
from finetune.commands.export import export_bundle
from finetune.runs.folder import open_run_folder
from finetune.web.serve_app import ServedModel

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
    assert float(shown[0]) < 1e-5 < float(shown[1])  # also if the values are small


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
    shutil.move(bundle, bundle := tmp_path / "elsewhere")
    outputs = [printed]
    for source in (bundle, tmp_path / "run"):
        done = command("predict", source, *arguments, "--json", "--device", "cpu")
        assert done.code == 0, done.errors
        outputs.append(done.output)
    *exported_rows, expected_rows = (list(map(json.loads, text.splitlines())) for text in outputs)
    for predicted in exported_rows:
        assert len(predicted) == 4
        for mine, expected in zip(predicted, expected_rows, strict=True):
            assert mine.keys() == expected.keys()
            for name, value in expected.items():
                is_exact = name in ("text", "text_pair", "label", "labels") or value is None
                assert mine[name] == (value if is_exact else pytest.approx(value, abs=1e-5))


@pytest.fixture(scope="module")
def bundle(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of a run that was moved away with its table; see ``run_of``."""
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    folder = tmp_path_factory.mktemp("bundles")
    lines = [f"{n},is it {n} ?,{'ab'[n % 2]}" for n in range(200)]
    table = folder / "secret" / "questions.csv"
    table.parent.mkdir()
    table.write_text("\n".join(["number,question,answer", *lines]))
    options = {"text_column": "question", "label_column": "answer", "validation_fraction": 0.2}
    run_tiny(folder / "run", model=tiny_folder, data=table, **options)
    export_bundle(folder / "run", output_dir=folder / "exported" / "bundle", zip=True)
    for name in ("run", "secret"):
        shutil.move(folder / name, folder / f"{name}-moved")
    return folder / "exported" / "bundle"


def run_of(bundle: Path) -> tuple[Path, Path]:
    folder = bundle.parents[1]
    return folder / "run-moved", folder / "secret-moved" / "questions.csv"


@pytest.mark.slow
def test_bundle_can_be_used_like_its_run(bundle: Path, command: "Command") -> None:
    run, table = run_of(bundle)
    predicted, metrics, served = [], [], []
    for source in (bundle, run):
        options = ("--target-precision", "0.6", "--explain", "--device", "cpu", "--json")
        done = command("predict", source, table, *options)
        assert done.code == 0, done.errors
        rows = [json.loads(line) for line in done.output.splitlines()]
        predicted.append([{**row, "probability": 0, "explanation": 0} for row in rows])
        done = command("evaluate", source, table, "--device", "cpu", "--json")
        assert done.code == 0, done.errors
        metrics.append(json.loads(done.output)["accuracy"])
        model = ServedModel(open_run_folder(source, accepts_bundle=True), device="cpu")
        served.append(model.info | {"run": ""})
    assert predicted[0] == predicted[1]
    assert predicted[0][0].keys() >= {"number", "question", "answer", "label"}
    assert metrics[0] == metrics[1]
    assert served[0] == served[1]
    texts = ["is it 3 ?", "why"]
    assert finetune.load(bundle).predict(texts) == finetune.predict(bundle, texts)


@pytest.mark.slow
def test_bundle_does_not_contain_local_paths(bundle: Path) -> None:
    for file in bundle.iterdir():
        assert b"secret" not in file.read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("program", [["classify.py"], ["-m", "finetune", "predict", "."]])
def test_onnxruntime_does_not_send_usage_data(
    bundle: Path, program: list[str], tmp_path: Path
) -> None:
    # Before it sends events, it writes an ID of the machine to the cache folder.
    (tmp_path / "home").mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    homes = {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    code = "import onnxruntime as o; o.InferenceSession('model.onnx')"
    for words, is_quiet in ((program, True), (["-c", code], False)):
        command = [sys.executable, *words, *["a text"] * is_quiet]
        subprocess.run(command, check=True, cwd=bundle, env=kept | homes)
        assert bool([*tmp_path.rglob("deviceid")]) != is_quiet


@pytest.mark.slow
def test_unsupported_bundle_operations_are_rejected(
    bundle: Path, command: "Command", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    for words, message in {
        "predict bundle x --runtime torch": "no weights for PyTorch",
        "predict bundle x --device mps": "only uses the CPU",
        "predict bundle x --runtime onnx-int8": "model_quantized.onnx is missing",
        "predict bundle.zip x": "unpack the bundle",
        "evaluate bundle": "does not have the data",
        "export onnx bundle": "is a bundle",
        "push bundle a/b --dry-run": "is a bundle",
        "report bundle": "is a bundle",
        "run bundle": "is a bundle",
    }.items():
        command(*words.split()).assert_rejected(2, message)
    assert json.loads(command("runs", ".", "--json").output)["runs"] == []


@pytest.mark.slow
def test_changed_bundle_file_is_detected(bundle: Path, command: "Command", tmp_path: Path) -> None:
    copied = shutil.copytree(bundle, tmp_path / "copied", copy_function=shutil.copyfile)
    assert command("predict", copied, "x").code == 0  # only the times differ
    for name in ("model.onnx", "model.onnx.data", "tokenizer.json", "verified.json"):
        whole = (copied / name).read_bytes()
        for changed in (whole[:-9], whole[: len(whole) // 2] + b"~" + whole[len(whole) // 2 + 1 :]):
            (copied / name).write_bytes(changed)
            remedy = "export it again with finetune export bundle RUN"
            command("predict", copied, "x").assert_rejected(2, remedy)
        (copied / name).write_bytes(whole)
    (copied / "config.yaml").unlink()
    command("predict", copied, "x").assert_rejected(2, "is incomplete", remedy)


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
