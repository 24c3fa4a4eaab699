"""The model of a run in onnxruntime, and the choice between it and PyTorch."""

import os
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import Config
from finetune.devices import Runtime, host
from finetune.errors import LossNotFiniteError, UsageError
from finetune.events import Info, emit
from finetune.files import read_json, write_json
from finetune.model.source import find_model
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import read_trained_config, reads_pairs
from finetune.runs.text_predictor import TextPredictor
from finetune.tokenization.encode import TextEncoder, encode_texts

if TYPE_CHECKING:
    from finetune.model.load import TextModel
    from finetune.tokenization.encode import Texts

# The file names of the library optimum, so that its classes find the files.
FILES = {"onnx": "model.onnx", "onnx-int8": "model_quantized.onnx"}
VERIFIED_FILE = "verified.json"
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

    def text_logits(self, texts: "Texts", pairs: "Texts | None" = None) -> NDArray[np.float32]:
        """Return the logits in fp32 or, with int8 weights, nearly."""
        options = self.config.model
        length, stride = options.max_length, options.window_stride
        encoded = encode_texts(self.encoder, texts, pairs, max_length=length, stride=stride)
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

    On a CPU with instructions for bf16, a run in bf16 stays in PyTorch, which is faster.
    """
    if runtime != "torch":
        config = read_trained_config(folder)
        is_exact = config.training.precision != "bf16" or not host.bf16_instructions()
        on_cpu = device == "cpu" or (device == "auto" and not host.may_have_gpu())
        if runtime != "auto" or (is_exact and on_cpu):
            try:
                return _open_export(folder, config, device=device, runtime=runtime)
            except UsageError as error:
                if runtime != "auto":
                    raise
                if (folder.onnx_folder / FILES["onnx"]).is_file():
                    emit(Info(f"predicting with PyTorch, because {error.message}"))
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
    verified = file.with_name(VERIFIED_FILE)
    if not (file.is_file() and verified.is_file()):
        raise UsageError(f"{file} is missing or not verified", remedy=remedy)
    import tokenizers

    try:
        content = read_json(verified)
        weights, facts = content["weights"], content["tokenizer"]
        backend = tokenizers.Tokenizer.from_file(str(file.with_name("tokenizer.json")))
        encoder = TextEncoder(backend, **facts)
    except Exception as error:  # tokenizers raises no other class
        raise UsageError(f"{file.parent} can't be read", remedy=remedy) from error
    if weights != find_model(str(folder.model_folder), revision=None).weights_sha256:
        raise UsageError(f"{file} was exported from other weights", remedy=remedy)
    emit(Info(f"predicting with {file}; --runtime torch uses PyTorch"))
    pairs = reads_pairs(folder)
    return OnnxPredictor(config, folder.read_task(), pairs, encoder, file)


def note_verified(folder: Path, text_model: "TextModel") -> None:
    """Note that an export predicts like a model, and what its tokenizer needs."""
    facts = vars(TextEncoder.of(text_model.tokenizer)).items()
    tokenizer = {name: value for name, value in facts if name != "backend"}
    weights = text_model.source.weights_sha256
    write_json(folder / VERIFIED_FILE, {"weights": weights, "tokenizer": tokenizer})
