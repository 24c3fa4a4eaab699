"""The model of a run in PyTorch. This module imports no libraries for reading data."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from finetune import distributed
from finetune.devices.base import BatchSize, Device, move_to_device
from finetune.devices.select import select_device
from finetune.evaluation.predict import Predictor
from finetune.events import WarningMessage, emit
from finetune.model.load import TextModel, load_model
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import read_trained_config, reads_pairs
from finetune.runs.text_predictor import TextPredictor
from finetune.tasks.base import Logits
from finetune.tokenization.encode import EncodedTexts
from finetune.training.precision import why_not

if TYPE_CHECKING:
    from finetune.tokenization.encode import Texts


@dataclass(frozen=True)
class TrainedModel(TextPredictor):
    """The model of a run on a device, in the precision in which its metrics were computed."""

    text_model: TextModel
    device: Device
    predictor: Predictor
    # Padded lengths to use. Default: depends on the texts.
    padded_lengths: Sequence[int] | None = None

    @classmethod
    def load(cls, folder: RunFolder, *, device: str) -> "TrainedModel":
        """Load the saved model of a run. All ranks call all methods."""
        config = read_trained_config(folder)
        task, model = folder.read_task(), str(folder.model_folder)
        text_model = load_model(model, revision=None, task=task, from_scratch=False, strict=True)
        chosen, options = select_device(device), config.training
        move_to_device(text_model.model, chosen.torch_device)
        precision = options.precision
        if reason := why_not(chosen, precision):
            message = f"using fp32 instead of the run's {precision}, because {reason}"
            emit(WarningMessage(f"{message}; probabilities may differ slightly"))
            precision = "fp32"
        batch_size = BatchSize(options.eval_batch_size, "evaluation batch size", chosen)
        distributed.use_device(chosen)
        predictor = Predictor(text_model.model, chosen, precision, batch_size)
        return cls(config, task, reads_pairs(folder), text_model, chosen, predictor)

    @property
    def place(self) -> str:
        return f"{self.device.name} ({self.device.description})"

    def encode(self, texts: "Texts", pairs: "Texts | None" = None) -> EncodedTexts:
        """Return the token IDs of texts or pairs."""
        options = self.config.model
        length, stride = options.max_length, options.window_stride
        return self.text_model.encode(texts, pairs, max_length=length, stride=stride)

    def encoded_logits(self, encoded: EncodedTexts, *, by_all: bool = False) -> Logits:
        """Return the logits. Each rank computes all of them, or ``by_all`` a part."""
        inputs, lengths = self.text_model.inputs(encoded), encoded.lengths
        if self.device.shapes.counts_evaluation and not by_all:
            # Pad to powers of two, so that later texts have the same shapes.
            lengths = 2 ** np.ceil(np.log2(lengths)).astype(np.int64)
        padded_lengths = self.padded_lengths
        if padded_lengths is None:
            self.device.choose_attention(longest_tokens=int(encoded.lengths.max()))
            padded_lengths = self.text_model.padded_lengths(lengths, self.device.shapes)
        with nullcontext() if by_all else distributed.alone():
            return self.predictor.logits(inputs, padded_lengths=padded_lengths)
