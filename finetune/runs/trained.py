"""The model of a run in PyTorch; this module does not import libraries that read data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from finetune import distributed
from finetune.devices.base import BatchSize, Device, move_to_device
from finetune.devices.select import select_device
from finetune.evaluation.predict import Predictor
from finetune.events import WarningMessage, emit
from finetune.model.load import TextModel, load_model
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import read_trained_config, reads_pairs
from finetune.runs.text_predictor import TextPredictor
from finetune.tokenization.examples import ModelInputs
from finetune.training.precision import why_not

if TYPE_CHECKING:
    from finetune.tokenization.encode import Texts


@dataclass(frozen=True)
class TrainedModel(TextPredictor):
    """The model of a run on a device, with the precision that its metrics were computed in."""

    text_model: TextModel
    device: Device
    predictor: Predictor

    @classmethod
    def load(cls, folder: RunFolder, *, device: str) -> "TrainedModel":
        """Load the saved model of a run; all ranks call all methods."""
        config = read_trained_config(folder)
        task, model = folder.read_task(), str(folder.model_folder)
        text_model = load_model(model, revision=None, task=task, from_scratch=False, strict=True)
        chosen, options = select_device(device), config.training
        move_to_device(text_model.model, chosen.torch_device)
        precision = options.precision
        if reason := why_not(chosen, precision):
            message = f"using fp32 instead of {precision} as in the run, because {reason}"
            emit(WarningMessage(f"{message}; probabilities may differ slightly"))
            precision = "fp32"
        batch_size = BatchSize(options.eval_batch_size, "evaluation batch size", chosen)
        distributed.use_device(chosen)
        predictor = Predictor(text_model.model, chosen, precision, batch_size)
        return cls(config, task, reads_pairs(folder), text_model, chosen, predictor)

    @property
    def place(self) -> str:
        return f"{self.device.name} ({self.device.description})"

    def text_logits(self, texts: "Texts", pairs: "Texts | None" = None) -> NDArray[np.float32]:
        """Return the logits; each rank computes all of them."""
        options = self.config.model
        encoded = self.text_model.encode(
            texts, pairs, max_length=options.max_length, stride=options.window_stride
        )
        lengths = encoded.lengths
        if self.device.shapes.counts_evaluation:
            # Pad to powers of two, so that later texts have the same shapes.
            lengths = 2 ** np.ceil(np.log2(lengths)).astype(np.int64)
        with distributed.alone():
            return self._logits(self.text_model.inputs(encoded), lengths)

    def logits(self, examples: ModelInputs) -> NDArray[np.float32]:
        """Return the logits of examples: float32 of shape [examples, classes], in their order."""
        return self._logits(examples, examples.lengths)

    def _logits(self, examples: ModelInputs, lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        self.device.choose_attention(longest_tokens=int(examples.lengths.max()))
        padded_lengths = self.text_model.padded_lengths(lengths, self.device.shapes)
        return self.predictor.logits(examples, padded_lengths=padded_lengths)
