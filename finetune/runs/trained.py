"""The model of a finished run; this module does not import libraries that read data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from finetune import distributed
from finetune.config.schema import Config
from finetune.devices.base import BatchSize, Device, move_to_device
from finetune.devices.select import select_device
from finetune.evaluation.explain import explain
from finetune.evaluation.predict import Predictor
from finetune.events import WarningMessage, emit
from finetune.model.load import TextModel, load_model
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import read_trained_config, reads_pairs
from finetune.tasks.base import Prediction
from finetune.tokenization.examples import ModelInputs
from finetune.training.precision import why_not


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run on a device, with the precision that its metrics were computed in."""

    config: Config
    text_model: TextModel
    device: Device
    predictor: Predictor
    reads_pairs: bool

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
        return cls(config, text_model, chosen, predictor, reads_pairs(folder))

    def predict(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        all_scores: bool = False,
        explains: bool = False,
    ) -> Sequence[Prediction]:
        """Return the prediction for each of at least one text or pair.

        With ``explains``, each prediction has the words that decided it.
        """
        task, logits = self.text_model.task, self.text_logits(texts, pairs)
        predictions = task.predict(texts, logits, all_scores=all_scores)
        if not explains:
            return predictions
        explanations = explain(task, self.text_logits, logits, texts, pairs)
        both = zip(predictions, explanations, strict=True)
        return [replace(prediction, explanation=words) for prediction, words in both]

    def text_logits(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> NDArray[np.float32]:
        """Return the logits of texts or pairs: float32 of shape [texts, outputs]."""
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

    def no_prediction(self, *, all_scores: bool = False) -> Prediction:
        """Return the prediction for a missing text, in which each value is None."""
        task = self.text_model.task
        logits = np.zeros((1, len(task.output_names)), np.float32)
        [prediction] = task.predict([""], logits, all_scores=all_scores)
        scores = prediction.probabilities
        values, probabilities = dict.fromkeys(prediction.values), scores and dict.fromkeys(scores)
        return replace(prediction, values=values, probabilities=probabilities)

    def logits(self, examples: ModelInputs) -> NDArray[np.float32]:
        """Return the logits of examples: float32 of shape [examples, classes], in their order."""
        return self._logits(examples, examples.lengths)

    def _logits(self, examples: ModelInputs, lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        self.device.choose_attention(longest_tokens=int(examples.lengths.max()))
        padded_lengths = self.text_model.padded_lengths(lengths, self.device.shapes)
        return self.predictor.logits(examples, padded_lengths=padded_lengths)
