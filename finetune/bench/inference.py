"""BERT-base on questions, as ``finetune predict`` runs it, at batch sizes in powers of two."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.bench.bert import GIGAFLOPS_A_TOKEN, bert_base, bert_structure, repeat, texts_of
from finetune.bench.workload import Task, Workload
from finetune.devices.base import Device, place
from finetune.evaluation.predict import predict_logits
from finetune.tokenization.buckets import choose_padded_lengths
from finetune.tokenization.examples import inputs_of_texts

_LARGEST = 256
_LARGEST_QUICK = 16


@dataclass(frozen=True, kw_only=True)
class _Inference(Workload):
    lengths: Sequence[int]

    def build(self, device: Device) -> Task:
        return _InferenceTask(device, self.lengths)


class _InferenceTask(Task):
    def __init__(self, device: Device, lengths: Sequence[int]) -> None:
        model = bert_base()
        self._takes_4d_mask = bert_structure().takes_4d_mask
        place(model, device.torch_device)
        self._model = model
        self._device, self._lengths = device, lengths

    def load(self, rows: int) -> None:
        texts = texts_of(repeat(self._lengths, rows))
        self._inputs = inputs_of_texts(texts, takes_4d_mask=self._takes_4d_mask)
        self._padded_lengths = choose_padded_lengths(texts.lengths, self._device.shapes)
        self._device.choose_attention(longest_tokens=self._padded_lengths[-1])

    def step(self) -> None:
        raise NotImplementedError("training is a group of its own")

    def evaluate(self) -> None:
        predict_logits(
            self._model,
            self._inputs,
            padded_lengths=self._padded_lengths,
            batch_size=len(self._inputs.lengths),
            device=self._device,
        )


def inference_workloads(lengths: Sequence[int], *, is_quick: bool) -> list[Workload]:
    """Return BERT-base at each batch size; ``lengths`` are the tokens of the texts."""
    largest = _LARGEST_QUICK if is_quick else _LARGEST
    tokens = float(np.mean(lengths))
    return [
        _Inference(
            group="inference",
            name=f"batch {rows}",
            rows=rows,
            least_rows=rows,
            phases=("evaluation",),
            gigaflops=GIGAFLOPS_A_TOKEN * tokens,
            lengths=lengths,
        )
        for rows in (2**power for power in range(largest.bit_length()))
    ]
