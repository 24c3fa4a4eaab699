"""Compares a few features that a device has computed with the CPU's."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.devices.base import Device
from finetune.errors import DeviceDiffers
from finetune.model.feature_extractor import FeatureExtractor
from finetune.tokenization.examples import Examples
from finetune.training.tolerances import TOLERANCES, worst_example_error

_EXAMPLES = 8


@dataclass(frozen=True)
class FeatureCheck:
    """The features of a few examples, as the CPU computes them in fp32.

    Args:
        indices: Of the examples, from the shortest to the longest.
        padded_length: Tokens of the longest.
        features: float32 of shape [examples, tokens, hidden], 0 for padding; [examples, 1, hidden]
            where a text has one vector.
    """

    indices: NDArray[np.int64]
    padded_length: int
    features: torch.Tensor

    @classmethod
    def prepare(cls, extractor: FeatureExtractor, examples: Examples) -> "FeatureCheck":
        """Compute features of a model that is still on the CPU."""
        by_length = np.argsort(examples.lengths, kind="stable")
        places = np.linspace(0, len(by_length) - 1, min(_EXAMPLES, len(by_length)))
        indices = by_length[places.astype(np.int64)]
        padded_length = int(examples.lengths[indices].max())
        inputs = examples.inputs_of(indices, padded_length)
        features = extractor.extract(inputs)
        if extractor.per_token:
            features = features * inputs["attention_mask"].reshape(len(indices), -1, 1)
        return cls(indices, padded_length, features.reshape(len(indices), -1, features.shape[-1]))

    def compare(self, examples: Examples, *, device: Device, precision: str) -> None:
        """Compare with the features that examples have for inputs.

        Raises:
            DeviceDiffers: If they differ by more than rounding.
        """
        actual = self._read(examples)
        error = worst_example_error(actual.flatten(1), self.features.flatten(1))
        # That of logits is for texts of which it is known what 16 bits make of them.
        tolerance = TOLERANCES[precision].gradients
        if not error <= tolerance:
            raise DeviceDiffers(
                f"the features of the frozen layers that {device.name} has computed differ from "
                f"the CPU's: they are off by {error:.2%}; {tolerance:.2%} passes",
                remedy=f"finetune cache clear, then --device cpu; finetune doctor --parity "
                f"--device {device.name} shows more",
            )

    def _read(self, examples: Examples) -> torch.Tensor:
        return examples.inputs_of(self.indices, self.padded_length)["inputs_embeds"]
