"""BERT-base on questions, as ``finetune predict`` runs it, at batch sizes in powers of two."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from finetune.bench.bert import GIGAFLOPS_A_TOKEN, bert_base, bert_structure, repeat, texts_of
from finetune.bench.workload import Load, Steps, Workload
from finetune.devices.base import Device, place
from finetune.evaluation.predict import predict_logits
from finetune.tokenization.buckets import choose_padded_lengths
from finetune.tokenization.examples import inputs_of_texts

_LARGEST = 256
_MAX_QUICK = 16


def inference_workloads(lengths: Sequence[int], *, is_quick: bool) -> list[Workload]:
    """Return BERT-base at each batch size; ``lengths`` are the tokens of the texts."""
    largest = _MAX_QUICK if is_quick else _LARGEST
    return [
        Workload(
            group="inference",
            name=f"batch {rows}",
            build=partial(_build, lengths),
            rows=rows,
            least_rows=rows,
            phases=("evaluation",),
            gigaflops=GIGAFLOPS_A_TOKEN * float(np.mean(lengths)),
        )
        for rows in (2**power for power in range(largest.bit_length()))
    ]


def _build(lengths: Sequence[int], device: Device) -> Load:
    model = bert_base()
    place(model, device.torch_device)

    def load(rows: int) -> Steps:
        texts = texts_of(repeat(lengths, rows))
        padded_lengths = choose_padded_lengths(texts.lengths, device.shapes)
        device.choose_attention(longest_tokens=padded_lengths[-1])
        evaluate = partial(
            predict_logits,
            model,
            inputs_of_texts(texts, takes_4d_mask=bert_structure().takes_4d_mask),
            padded_lengths=padded_lengths,
            batch_size=rows,
            device=device,
        )
        return {"evaluation": evaluate}

    return load
