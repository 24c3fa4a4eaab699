"""``finetune doctor --parity``: the comparison of a run with the CPU, on batches of more shapes."""

import math
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from finetune.batch_finder.trial_model import prepare_trial_model
from finetune.config.schema import Mode, ModelConfig
from finetune.devices.base import Device
from finetune.devices.select import check_precision, select_device
from finetune.doctor.operators import CLASSES, case_of
from finetune.events import Info, emit
from finetune.model.load import count_positions, load_model, random_classifier
from finetune.model.mean_pooling import has_mean_layer
from finetune.model.structure import find_structure
from finetune.tasks.single import Single
from finetune.tokenization.encode import random_texts
from finetune.tokenization.examples import Examples, inputs_of_texts
from finetune.training.checks import Difference, compare_with_cpu
from finetune.training.precision import note_parity

# Around the blocks of 8 and 32 tokens that attention's kernels work on.
_LENGTHS = (1, 8, 9, 31, 32, 33, 64)
_BATCH_SIZES = (1, 7, 32)
_TEXTS = 256
_GRADIENT_EXAMPLES = 8


@dataclass(frozen=True)
class ParityReport:
    """Differences between a device and the CPU in fp32."""

    device: str
    precision: str
    differences: tuple[Difference, ...]

    @property
    def failures(self) -> tuple[Difference, ...]:
        """The differences that are too large."""
        return tuple(difference for difference in self.differences if not difference.passes)

    def worst_by_part(self) -> dict[str, Difference]:
        """Return the worst difference of each part."""
        worst: dict[str, Difference] = {}
        for difference in self.differences:
            worst[difference.part] = max(
                worst.get(difference.part, difference), difference, key=lambda each: each.error
            )
        return worst

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, with null for infinity."""
        return {
            "schema_version": 1,
            "device": self.device,
            "precision": self.precision,
            "passes": not self.failures,
            "differences": [
                asdict(difference)
                | {"error": difference.error if math.isfinite(difference.error) else None}
                for difference in self.differences
            ],
        }


def check_parity(
    device: str, *, model: str | None, mode: Mode, precision: str, batch_size: int
) -> ParityReport:
    """Compare a device with the CPU; store the result for ``--precision auto``."""
    there = select_device(device)
    check_precision(there, precision)
    if model is None:
        classifier = random_classifier(ModelConfig.model, classes=CLASSES, seed=0)
    else:
        torch.manual_seed(0)
        task = Single([str(number) for number in range(CLASSES)])
        loaded = load_model(model, revision=None, task=task, from_scratch=False)
        classifier = loaded.model
    emit(Info(f"comparing {there.name} ({there.description}) in {precision} with the CPU in fp32"))
    report = compare_model(
        classifier, there, mode=mode, precision=precision, max_batch_size=batch_size
    )
    subject = f"{model or ModelConfig.model}, {mode}"
    note_parity(there, precision=precision, subject=subject, passes=not report.failures)
    return report


def compare_model(
    model: PreTrainedModel, device: Device, *, mode: Mode, precision: str, max_batch_size: int
) -> ParityReport:
    """Compare logits and gradients on a device and on the CPU. The model moves to the device."""
    structure = find_structure(model, has_mean_layer=has_mean_layer(model))
    # Stored transposed, as loaded weights may be.
    for parameter in map(model.get_parameter, structure.layers[-1]):
        if parameter.ndim == 2:
            parameter.data = parameter.detach().T.contiguous().T
    longest = min(_LENGTHS[-1], count_positions(model) or _LENGTHS[-1])
    device.choose_attention(longest_tokens=longest)
    config = model.config
    texts = random_texts(
        np.arange(_TEXTS) % longest + 1,
        vocabulary_size=config.vocab_size,
        padding_id=config.pad_token_id or 0,
        seed=0,
    )
    inputs = inputs_of_texts(texts, takes_4d_mask=structure.takes_4d_mask)
    labels = np.random.default_rng(0).integers(CLASSES, size=_TEXTS)
    examples = Examples(inputs.inputs_of, inputs.lengths, labels, np.ones(_TEXTS, np.float32))
    case = case_of(model, device=device, mode=mode, precision=precision, padded_length=longest)
    trainer = prepare_trial_model(case, model, structure, device=device).trainer
    lengths = sorted({min(device.shapes.padded_length(tokens), longest) for tokens in _LENGTHS})
    sizes = sorted({*(min(size, max_batch_size) for size in _BATCH_SIZES), max_batch_size})
    shapes = [(size, length) for length, size in product(lengths, sizes)]
    differences = compare_with_cpu(trainer, examples, [*shapes, (_GRADIENT_EXAMPLES, longest)])
    return ParityReport(device.name, precision, tuple(differences))
