"""Predictions with onnxruntime instead of PyTorch."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import TEXTS, Command, run_tiny

import finetune
from finetune.commands.export import export_onnx
from finetune.commands.predict import load
from finetune.devices import host
from finetune.errors import UsageError
from finetune.files import SUMS, read_json, write_json
from finetune.runs.folder import RunFolder
from finetune.runs.runtime import OnnxPredictor, load_predictor
from finetune.runs.trained import TrainedModel

pytest.importorskip("onnxruntime", reason="needs the extra onnx")
LONG = [*TEXTS, "how far is the longest river of the country " * 9]


def rows(kind: str) -> list[dict[str, Any]]:
    pairs = {"text_pair": "who wrote the word"} if kind == "pairs" else {}
    return [{"text": f"is it {n} ?", **pairs, "label": "ab"[n % 2]} for n in range(60)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "exported"
    run_tiny(folder, model=tiny_folder)
    export_onnx(folder, verify=True, int8=True)
    return folder


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "may_have_gpu", lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "pairs"])
def test_onnxruntime_predicts_like_pytorch(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    options = {"long_texts": "windows", "max_length": 10, "stride": 2} if kind == "windows" else {}
    run_tiny(tmp_path / "run", model=tiny_folder, data=rows(kind), num_train_epochs=1, **options)
    export_onnx(tmp_path / "run", verify=True)
    folder, pairs = RunFolder(tmp_path / "run"), LONG[::-1] if kind == "pairs" else None
    torch, onnx = (load_predictor(folder, device="cpu", runtime=name) for name in ("torch", "onnx"))
    assert isinstance(onnx, OnnxPredictor)
    expected = torch.text_logits(LONG, pairs)
    np.testing.assert_allclose(onnx.text_logits(LONG, pairs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("onnx/verified.json", "is missing or not verified"),
        ("onnx/model.onnx", "model.onnx is not the file that was verified"),
        ("onnx/tokenizer.json", "tokenizer.json is not the file that was verified"),
        ("model/model.safetensors", "model.safetensors is not the file that was verified"),
    ],
)
def test_auto_uses_only_verified_files_of_the_same_weights(
    exported: Path, name: str, problem: str
) -> None:
    folder, file = RunFolder(exported), exported / name
    assert isinstance(load_predictor(folder, device="auto", runtime="auto"), OnnxPredictor)
    whole, times = file.read_bytes(), file.stat()
    digests = folder.model_folder / SUMS
    known = digests.read_bytes()
    try:
        # The last bytes are of a weight.
        file.write_bytes(whole[:-2] + b"~~")
        digests.unlink()  # of another training, not of damaged files
        if name == "onnx/verified.json":
            file.unlink()
        assert isinstance(load_predictor(folder, device="auto", runtime="auto"), TrainedModel)
        with pytest.raises(UsageError, match=problem) as caught:
            load_predictor(folder, device="auto", runtime="onnx")
        assert caught.value.remedy == f"finetune export onnx {exported} --verify"
    finally:
        file.write_bytes(whole)
        digests.write_bytes(known)
    # The time of the file differs, but not its bytes.
    assert isinstance(load_predictor(folder, device="auto", runtime="auto"), OnnxPredictor)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.slow
def test_auto_uses_pytorch_on_a_gpu_and_for_fast_bf16(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(exported)
    with monkeypatch.context() as patch:
        patch.setattr(host, "may_have_gpu", lambda: True)
        assert isinstance(load_predictor(folder, device="auto", runtime="auto"), TrainedModel)
        assert isinstance(load_predictor(folder, device="cpu", runtime="auto"), OnnxPredictor)
    options, digests = read_json(folder.inference_file), folder.model_folder / SUMS
    known = digests.read_bytes()
    digests.unlink()  # of a run in bf16, not of damaged files
    write_json(folder.inference_file, options | {"precision": "bf16"})
    try:
        for instructions, kind in ((["amx_bf16"], TrainedModel), ([], OnnxPredictor)):
            monkeypatch.setattr(host, "bf16_instructions", lambda found=instructions: found)
            assert isinstance(load_predictor(folder, device="cpu", runtime="auto"), kind)
    finally:
        write_json(folder.inference_file, options)
        digests.write_bytes(known)


@pytest.mark.slow
def test_commands_give_the_same_results_with_onnxruntime(exported: Path, command: Command) -> None:
    results = []
    for runtime in ("torch", "onnx", "onnx-int8"):
        done = command("evaluate", exported, "--runtime", runtime, "--device", "cpu", "--json")
        assert done.code == 0, done.errors
        assert ("onnxruntime" in done.errors) == (runtime != "torch")
        results.append(json.loads(done.output)["accuracy"])
    assert results[1] == results[0]
    assert abs(results[2] - results[0]) < 0.1
    torch, onnx = (
        finetune.predict(exported, TEXTS, explain=True, device="cpu", runtime=name)
        for name in ("torch", "onnx")
    )
    assert [one.label for one in torch] == [one.label for one in onnx]
    assert onnx[0].probability == pytest.approx(torch[0].probability, abs=1e-4)
    command("predict", exported, "a text", "--runtime", "onnx", "--device", "mps").assert_rejected(
        2, "--runtime onnx only uses the CPU"
    )


@pytest.mark.slow
def test_onnx_model_can_be_copied_and_pickled(exported: Path) -> None:
    model = load(exported, device="cpu", runtime="onnx")
    expected = model.predict(TEXTS)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.predict(TEXTS) == expected


@pytest.mark.slow
def test_onnxruntime_predicts_without_importing_pytorch(exported: Path) -> None:
    code = f"""if True:
        import sys
        from finetune.commands.main import main
        sys.argv = ["finetune", "predict", {str(exported)!r}, "a text", "--runtime", "onnx"]
        try:
            main()
        finally:
            assert not {{"torch", "transformers"}} & {{*sys.modules}}, "imported"
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "imported" not in done.stderr
    assert "a text" in done.stdout
