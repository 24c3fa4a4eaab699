"""The model of a run as ONNX, or as a bundle that needs no PyTorch: written and compared."""

import contextlib
import io
import json
import logging
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from torch import nn

from finetune.config.load import dump_config
from finetune.config.schema import OPTIONS, change_options
from finetune.data.dataset import texts_of
from finetune.errors import FinetuneError, ModelUnsupportedError, UsageError, packages_of, reason_of
from finetune.files import SUMS, read_json, replacing, write_json, write_sums, write_text_atomically
from finetune.model.load import TextModel
from finetune.ownership import OwnFolder
from finetune.runs.folder import BundleFolder, RunFolder
from finetune.runs.manifest import Manifest
from finetune.runs.runtime import FILES, TOKENIZER, VERIFIED_FILE, OnnxPredictor, note_verified
from finetune.runs.text_predictor import TextPredictor
from finetune.runs.trained import TrainedModel
from finetune.tokenization.encode import TextEncoder
from finetune.tokenization.examples import Inputs, prepare_mask

MODEL_FILE, QUANTIZED_FILE = FILES["onnx"], FILES["onnx-int8"]
_PACKAGES = ("onnxruntime", "onnx", "onnxscript")
# The exporter treats dimensions of size 1, and dimensions of equal size, as constants.
EXAMPLE_SHAPE = (2, 7)
# Copied into each bundle; it imports nothing of this package.
CLASSIFY_FILE = Path(__file__).with_name("classify.py")
BUNDLE_PACKAGES = ("numpy", "onnxruntime", "tokenizers")
DOCKERFILE = """\
# A container classifies its arguments, or with - its standard input, and ends. So it has no
# HEALTHCHECK.
FROM python:{python}-slim
WORKDIR /bundle
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY --chown=nobody . .
RUN sha256sum --check --quiet SHA256SUMS
USER nobody
ENTRYPOINT ["python", "classify.py"]
"""
# Predicts texts with a bundle, in a process that can't import the packages for training.
PREDICT_WITH_BUNDLE = """\
import json, sys
blocked = "torch", "transformers", "datasets", "finetune", "pyarrow", "pandas", "scipy"
sys.modules.update(dict.fromkeys(blocked))
sys.path.insert(0, sys.argv[1])
from classify import Classifier
print(json.dumps(Classifier().predict(*json.load(sys.stdin), all_scores=True)))
"""
# A bundle may give this many rows another label, and probabilities this far from the run.
MAX_OTHER_LABELS, MAX_DIFFERENCE = 0.001, 1e-3
# Largest absolute value of a quantized weight.
MAX_WEIGHT = 64
# ONNX functions that replace operators of an exported model, for a version of the ONNX operators.
# onnxruntime inlines them, and quantizes a row once even if several matrices read it.
INT8_FUNCTIONS = (
    """
    <domain: "finetune", opset_import: ["": %d, "com.microsoft": 1]>
    Int8MatMul (x, columns, scales, sums) => (y) {
        axis = Constant <value_ints: ints = [-1]> ()
        step = Constant <value_float: float = 0.003921569> ()
        tiny = Constant <value_float: float = 1e-30> ()
        zero = Constant <value: tensor = uint8 {0}> ()
        low = ReduceMin (x, axis)
        high = ReduceMax (x, axis)
        difference = Sub (high, low)
        range = Max (difference, tiny)
        above = Sub (x, low)
        fraction = Div (above, range)
        activations = QuantizeLinear (fraction, step, zero)
        product = com.microsoft.MatMulIntegerToFloat (activations, columns, step, scales, zero)
        scaled = Mul (product, range)
        offset = Mul (low, sums)
        y = Add (scaled, offset)
    }
    """,
    """
    <domain: "finetune", opset_import: ["": %d]>
    Int8Gather (ids, rows, row_scales) => (y) {
        integers = Gather (rows, ids)
        values = Cast <to = 1> (integers)
        scales = Gather (row_scales, ids)
        y = Mul (values, scales)
    }
    """,
)


class _LogitsOnly(nn.Module):
    def __init__(self, text_model: TextModel) -> None:
        super().__init__()
        self.model: nn.Module = text_model.model
        self.takes_4d_mask = text_model.structure.takes_4d_mask

    def forward(self, inputs: Inputs) -> torch.Tensor:
        inputs = {**inputs, "attention_mask": inputs["attention_mask"] != 0}
        prepared = prepare_mask(inputs, takes_4d_mask=self.takes_4d_mask)
        logits: torch.Tensor = self.model(**prepared).logits
        return logits


def import_runtime() -> Any:
    """Import the packages of the extra ``onnx`` and return onnxruntime."""
    try:
        with _silence():
            runtime, *_ = [import_module(package) for package in _PACKAGES]
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        remedy = "pip install onnx onnxruntime onnxscript"
        raise UsageError(f"this export needs the package {error.name}", remedy=remedy) from error
    return runtime


def write_onnx(text_model: TextModel, folder: OwnFolder) -> None:
    """Write a model as ONNX, with its config and tokenizer.

    The inputs are the outputs of the tokenizer, int64 [batch, length]; ``logits`` are float32
    [batch, classes].
    """
    with _exporting(text_model, folder, last="config.json") as partial:
        text_model.model.config.save_pretrained(partial)
        text_model.tokenizer.save_pretrained(partial)
        for name in (QUANTIZED_FILE, VERIFIED_FILE, SUMS):  # of an earlier export
            (folder.path / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _exporting(
    text_model: TextModel, folder: OwnFolder, *, last: str, external_data: bool = False
) -> Iterator[Path]:
    """Yield a temporary folder with the ONNX model, whose files move to the folder at the end."""
    with folder.make(), replacing(folder.path, last=last) as partial:
        try:
            with _silence():
                _export(text_model, partial, external_data=external_data)
        except Exception as error:
            if isinstance(error, OSError) or packages_of(error)[-1] == "finetune":
                raise
            name = type(text_model.model).__name__
            raise ModelUnsupportedError(
                f"{name} can't be converted to ONNX: {reason_of(error.__cause__ or error)}",
                remedy="use RUN/model with transformers",
            ) from error
        yield partial


def write_bundle(
    run: RunFolder,
    trained: TrainedModel,
    folder: BundleFolder,
    *,
    card: str,
    rows: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Write a folder that predicts with the packages in its requirements.txt.

    ``rows`` are texts, and maybe their pairs. Raise if ``classify.py`` predicts other labels for
    them than the run, in a new process. Return the comparison.
    """
    text_model = trained.text_model
    tokenizer, task = text_model.tokenizer, text_model.task
    has_windows = trained.config.model.window_stride is not None
    inference = {
        **read_json(run.inference_file),
        "task": task.name,
        "classes": task.class_names,
        "thresholds": [*task.parameters.get("thresholds", {}).values()],
        "truncation_side": "right" if has_windows else tokenizer.truncation_side,
        "pads_left": tokenizer.padding_side == "left",
        "padding": [tokenizer.pad_token_id, tokenizer.pad_token_type_id],
    }
    files = {
        "README.md": card,
        "requirements.txt": "".join(f"{name}=={version(name)}\n" for name in BUNDLE_PACKAGES),
        "Dockerfile": DOCKERFILE.format(python="{}.{}".format(*sys.version_info)),
        CLASSIFY_FILE.name: CLASSIFY_FILE.read_text(encoding="utf-8"),
    }
    # onnxruntime maps a separate file of weights into memory, which takes a third of the time.
    export = _exporting(text_model, folder, last=CLASSIFY_FILE.name, external_data=True)
    with export as partial:
        tokenizer.backend_tokenizer.save(str(partial / TOKENIZER))
        write_json(partial / "inference.json", inference)
        for name, content in files.items():
            (partial / name).write_text(content, encoding="utf-8")
        _describe_run(run, BundleFolder(partial))
        compared = _check_bundle(trained, partial, rows)
        note_verified(partial, run, tokenizer)
        write_sums(partial)
    return compared


def _describe_run(run: RunFolder, bundle: BundleFolder) -> None:
    """Write what ``finetune predict`` reads of a run, without texts and folders of this machine."""
    config = run.read_config()
    changes = {name: option.default for name, option in OPTIONS.items() if option.is_path}
    for name in ("data", "model"):
        value = OPTIONS[name].value_in(config)
        changes[name] = Path(value).name if Path(value).is_absolute() else value
    text = dump_config(change_options(config, changes))
    write_text_atomically(bundle.config_file, text)
    Manifest({}, {}, {}, Manifest.read(run).columns).write(bundle)
    results = run.read(run.results_file, lambda content: dict(content).items())
    tests = {name: value for name, value in results if name.startswith("test_")}
    write_json(bundle.results_file, tests)
    for source in (run.model_config_file, run.confidences_file):
        if source.is_file():
            shutil.copyfile(source, bundle.path / source.name)


def _check_bundle(
    trained: TrainedModel, folder: Path, rows: Sequence[Sequence[str]]
) -> dict[str, Any]:
    command = [sys.executable, "-I", "-B", "-c", PREDICT_WITH_BUNDLE, str(folder)]
    done = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["it was stopped"])[-1]
        raise FinetuneError(f"the bundle doesn't predict: {reason}", remedy="report this as a bug")
    [in_fp32] = predictors(trained)
    expected = [prediction.result for prediction in in_fp32.predict(*rows, all_scores=True)]
    actual, name = json.loads(done.stdout), trained.text_model.task.result_name
    same = float(np.mean([a[name] == b[name] for a, b in zip(expected, actual, strict=True)]))
    if not trained.text_model.task.class_names:  # values differ in their last digits
        same = 1.0
    # The probabilities of the classes, or the value.
    ours, theirs = (
        np.array([[*each.get("probabilities", each).values()] for each in side])
        for side in (expected, actual)
    )
    difference = float(np.abs(ours - theirs).max() / np.abs(ours).max())
    if same < 1 - MAX_OTHER_LABELS or difference > MAX_DIFFERENCE:
        raise FinetuneError(
            f"the bundle does not predict like the model of the run: {1 - same:.1%} of the labels "
            f"differ, and probabilities or values by up to {difference:.1e} of the largest",
            remedy="report this as a bug",
        )
    return {"samples": len(actual), "same_labels": same, "largest_difference": difference}


def _export(text_model: TextModel, folder: Path, *, external_data: bool) -> None:
    """Write the graph from the inputs of the tokenizer to the logits."""
    # Without padding, because some models count positions from the padding.
    names, token = text_model.tokenizer.model_input_names, text_model.tokenizer.sep_token_id or 1
    values = {"input_ids": token, "attention_mask": 1}
    example = {name: torch.full(EXAMPLE_SHAPE, values.get(name, 0)) for name in names}
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=text_model.max_tokens)
    shapes = ({name: {0: batch, 1: length} for name in names},)
    model = _LogitsOnly(text_model).eval()
    traced = torch.export.export(model, (example,), dynamic_shapes=shapes)
    program = torch.onnx.export(traced, input_names=names, output_names=["logits"])
    assert program is not None
    program.save(folder / MODEL_FILE, external_data=external_data)


def write_int8(folder: OwnFolder, is_accurate: Callable[[Path], bool]) -> None:
    """Write the exported model with int8 weights, unless the function rejects the new file."""
    with folder.make(), replacing(folder.path, last=QUANTIZED_FILE) as partial:
        quantize(folder.path / MODEL_FILE, file := partial / QUANTIZED_FILE)
        if not is_accurate(file):
            file.unlink()


def quantize(source: Path, target: Path) -> None:
    """Write an ONNX model with weights of 7 bits, which give the same sums on every CPU.

    On x86 CPUs without VNNI, kernels add pairs of products of unsigned activations and weights in
    16 bits. With 8 bits, such a sum saturates: 2 · 255 · 127 > 32,767, but 2 · 255 · 64 does not.
    Each matrix has a scale per column. Each row of activations (a token) has its own range, so
    a token with large activations costs the others no precision, and predictions don't depend on
    the batch. Embeddings have 8 bits and a scale per row.
    """
    import onnx

    model, added = onnx.load(source), dict[str, NDArray[Any]]()
    graph = model.graph
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    matrices = {
        name: array
        for name, array in arrays.items()
        if array.ndim == 2 and array.dtype == np.float32
    }
    for node in graph.node:
        gathers_rows = node.op_type == "Gather" and not any(axis.i for axis in node.attribute)
        if node.op_type == "MatMul" and node.input[1] in matrices:
            inputs, name = node.input
            integers, scales = _to_integers(matrices[name], axis=0, largest=MAX_WEIGHT)
            sums = (integers * scales).sum(axis=0)
            parts = {"columns": integers, "column_scales": scales[0], "column_sums": sums}
        elif gathers_rows and node.input[0] in matrices:
            name, inputs = node.input
            integers, scales = _to_integers(matrices[name], axis=1, largest=127)
            parts = {"rows": integers, "row_scales": scales}
        else:
            continue
        parts = {f"{name}_{part}": values for part, values in parts.items()}
        added |= parts
        node.op_type, node.domain = f"Int8{node.op_type}", "finetune"
        node.input[:] = [inputs, *parts]
        del node.attribute[:]
    used = {name for node in graph.node for name in node.input}
    kept = [each for each in graph.initializer if each.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    graph.initializer.extend(onnx.numpy_helper.from_array(added[name], name) for name in added)
    version = next(each.version for each in model.opset_import if not each.domain)
    model.functions.extend(onnx.parser.parse_function(text % version) for text in INT8_FUNCTIONS)
    for domain in ("finetune", "com.microsoft"):
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    onnx.save(model, target)


def _to_integers(
    values: NDArray[np.float32], *, axis: int, largest: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the matrix in int8, and the scales of its columns (axis 0) or rows (axis 1)."""
    tiny = np.finfo(np.float32).tiny
    scales = np.maximum(np.abs(values).max(axis=axis, keepdims=True) / largest, tiny)
    return np.round(values / scales).astype(np.int8), scales


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide the progress of the converter and its advice on versions and packages."""
    logging.disable(logging.WARNING)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)


def predictors(trained: TrainedModel, *files: Path) -> list[TextPredictor]:
    """Return the model of a run in PyTorch in fp32, and each file in onnxruntime."""
    in_fp32 = replace(trained, predictor=replace(trained.predictor, precision="fp32"))
    of_run = trained.config, trained.task, trained.reads_pairs
    encoder = TextEncoder.of(trained.text_model.tokenizer)
    return [in_fp32, *(OnnxPredictor(*of_run, encoder, file) for file in files)]


def compare(
    reference: TextPredictor, exported: TextPredictor, rows: pyarrow.Table
) -> dict[str, Any]:
    """Compare two predictors of one model on rows with labels, such as PyTorch and onnxruntime.

    ``same_labels`` is the fraction of the rows that get the same labels, None for a regression, as
    ``largest_probability_difference``. The difference of logits is relative to the largest logit,
    if that is beyond 1 or a value. ``speed`` is how many times as fast the exported model is.
    """
    task = reference.task
    labels, logits, seconds = task.labels(rows["label"]), [], []
    for model in (reference, exported):
        start = time.perf_counter()
        logits.append(model.text_logits(*texts_of(rows)))
        seconds.append(time.perf_counter() - start)
    expected, actual = map(task.read_logits, logits)
    same = difference = None
    if expected.probabilities is not None and actual.probabilities is not None:
        is_same = (expected.predicted == actual.predicted).reshape(len(labels), -1)
        same = float(is_same.all(axis=1).mean())
        difference = float(np.abs(expected.probabilities - actual.probabilities).max())
    largest = max(np.abs(logits[0]).max(), 1.0 if task.class_names else np.finfo(np.float32).tiny)
    reference_metrics, metrics = (task.score(each, labels).metrics for each in logits)
    return {
        "samples": len(labels),
        "same_labels": same,
        "largest_logit_difference": float(np.abs(logits[0] - logits[1]).max() / largest),
        "largest_probability_difference": difference,
        "metrics": metrics,
        "reference_metrics": reference_metrics,
        "speed": seconds[0] / seconds[1],
    }
