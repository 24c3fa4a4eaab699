"""The model of a run in onnxruntime, and the choice between it and PyTorch."""

import os
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.config.schema import Config
from finetune.devices import Runtime, host
from finetune.errors import LossNotFiniteError, UsageError, reason_of
from finetune.events import Info, emit
from finetune.files import describe_file, has_changed, read_json, write_json
from finetune.runs.folder import BundleFolder, RunFolder
from finetune.runs.manifest import read_trained_config, reads_pairs
from finetune.runs.text_predictor import TextPredictor
from finetune.tasks.base import Logits
from finetune.tokenization.encode import EncodedTexts, TextEncoder, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from finetune.tokenization.encode import Texts

# Set before onnxruntime is imported. Otherwise it sends events to Microsoft.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# The file names of the library optimum, so that its classes find the files.
FILES = {"onnx": "model.onnx", "onnx-int8": "model_quantized.onnx"}
VERIFIED_FILE, TOKENIZER = "verified.json", "tokenizer.json"
# On two cores, 4,096 take up to 1.8 times as long, because activations leave the processor cache.
BATCH_TOKENS = 512


@dataclass(frozen=True)
class OnnxPredictor(TextPredictor):
    """An ONNX file in onnxruntime on the CPU."""

    encoder: TextEncoder
    file: Path

    @cached_property
    def session(self) -> Any:
        """The session of onnxruntime, which a copy in another process opens again."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", 0))  # 0: all cores
        # On a busy machine, threads that wait actively take cores from those that compute.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file, providers = str(self.file), ["CPUExecutionProvider"]
        return onnxruntime.InferenceSession(file, options, providers=providers)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "session"}

    @property
    def place(self) -> str:
        return f"cpu ({host.cpu_name()}), with onnxruntime"

    def encode(self, texts: "Texts", pairs: "Texts | None" = None) -> EncodedTexts:
        """Return the token IDs of texts or pairs."""
        options = self.config.model
        length, stride = options.max_length, options.window_stride
        return encode_texts(self.encoder, texts, pairs, max_length=length, stride=stride)

    def encoded_logits(self, encoded: EncodedTexts, *, by_all: bool = False) -> Logits:
        """Return the logits in fp32 or, with int8 weights, nearly; each rank computes all."""
        lengths, names = encoded.lengths, [value.name for value in self.session.get_inputs()]
        logits = np.empty((len(lengths), len(self.task.output_names)), np.float32)
        order = np.argsort(-lengths, kind="stable")
        while len(order):
            longest = int(lengths[order[0]])
            size = max(1, BATCH_TOKENS // longest)
            batch, order = order[:size], order[size:]
            arrays = encoded.padded(batch, padded_length=longest)
            inputs = {name: arrays[name].astype(np.int64) for name in names}
            logits[batch] = self.session.run(["logits"], inputs)[0]
        if not np.isfinite(logits).all():
            raise LossNotFiniteError(
                f"the logits of {self.file} are NaN or infinite", remedy="use --runtime torch"
            )
        return encoded.windows.average(logits) if encoded.windows else logits


def load_predictor(folder: RunFolder, *, device: str, runtime: Runtime) -> TextPredictor:
    """Load the model of a run; ``auto`` is onnxruntime if it has a verified export for the CPU.

    On a CPU with instructions for bf16, a run in bf16 stays in PyTorch, which is faster. A bundle
    only has the export.
    """
    if is_bundle := isinstance(folder, BundleFolder):
        if runtime == "torch":
            message = f"{folder.path} is a bundle, which has no weights for PyTorch"
            raise UsageError(message, remedy="drop --runtime, or pass the run that it comes from")
        runtime = "onnx" if runtime == "auto" else runtime
    if runtime != "torch":
        config = read_trained_config(folder)
        is_exact = config.training.precision != "bf16" or not host.bf16_instructions()
        on_cpu = device == "cpu" or (device == "auto" and not host.may_have_gpu())
        if runtime != "auto" or (is_exact and on_cpu):
            try:
                model = _open_export(folder, config, device=device, runtime=runtime)
            except UsageError as error:
                if runtime != "auto":
                    raise
                if (folder.onnx_folder / FILES["onnx"]).is_file():
                    emit(Info(f"predicting with PyTorch, because {error.message}"))
            else:
                torch = "" if is_bundle else "; --runtime torch uses PyTorch"
                emit(Info(f"predicting with {model.file}{torch}"))
                return model
    from finetune.runs.trained import TrainedModel

    return TrainedModel.load(folder, device=device)


def _open_export(
    folder: RunFolder, config: Config, *, device: str, runtime: Runtime
) -> OnnxPredictor:
    """Return the verified export of a run, or raise ``UsageError``."""
    if device not in ("auto", "cpu"):
        raise UsageError(f"--runtime {runtime} only uses the CPU", remedy="drop --device")
    if find_spec("onnxruntime") is None:
        message = f"--runtime {runtime} needs the package onnxruntime"
        raise UsageError(message, remedy="pip install onnxruntime")
    file = folder.onnx_folder / FILES[runtime.replace("auto", "onnx")]
    remedy = f"finetune export onnx {folder.path} --verify" + " --int8" * (runtime == "onnx-int8")
    if isinstance(folder, BundleFolder):
        remedy = "export it again with finetune export bundle RUN"
    verified = file.with_name(VERIFIED_FILE)
    if not (file.is_file() and verified.is_file()):
        raise UsageError(f"{file} is missing or not verified", remedy=remedy)
    import tokenizers

    try:
        content = read_json(verified)
        noted, facts = content["files"], content["tokenizer"]
        names = [file.name, TOKENIZER, *({f"{file.name}.data"} & {*noted})]
        files = {file.with_name(name): noted[name] for name in names}
        if not isinstance(folder, BundleFolder):
            files[folder.weights_file] = content["weights"]
        changed = [path for path, described in files.items() if has_changed(path, described)]
        encoder = None
        if not changed:
            backend = tokenizers.Tokenizer.from_file(str(file.with_name(TOKENIZER)))
            encoder = TextEncoder(backend, **facts)
    except Exception as error:  # tokenizers raises no other class
        reason = f"{file.parent} can't be read: {reason_of(error)}"
        raise UsageError(reason, remedy=remedy) from error
    if encoder is None:
        message = f"{changed[0]} is not the file that was verified with the export"
        raise UsageError(message, remedy=remedy)
    return OnnxPredictor(config, folder.read_task(), reads_pairs(folder), encoder, file)


def note_verified(folder: Path, run: RunFolder, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Note that the files of an export predict like a run, and what its tokenizer needs."""
    facts = vars(TextEncoder.of(tokenizer)).items()
    needed = {name: value for name, value in facts if name != "backend"}
    files = [folder / name for name in (*FILES.values(), f"{FILES['onnx']}.data", TOKENIZER)]
    described = {file.name: describe_file(file) for file in files if file.is_file()}
    weights = describe_file(run.weights_file)
    content = {"weights": weights, "files": described, "tokenizer": needed}
    write_json(folder / VERIFIED_FILE, content)
