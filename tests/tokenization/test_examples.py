from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import tiny_tokenizer

from finetune.tokenization.encode import encode_texts
from finetune.tokenization.examples import collate

TEXTS = ["who wrote the word", "", "how far", "the longest river of the country"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_examples_are_laid_out_as_the_tokenizer_pads_them(side: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    indices = np.array([2, 0, 3])

    tensors = collate(encode_texts(tokenizer, TEXTS, max_length=20), indices, padded_length=11)

    expected = tokenizer(
        [TEXTS[index] for index in indices],
        padding="max_length",
        max_length=11,
        return_tensors="pt",
    )
    assert torch.equal(tensors["input_ids"], expected.input_ids)
    assert torch.equal(tensors["attention_mask"], expected.attention_mask.bool())


def test_every_column_has_its_own_padding() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    encoded = encode_texts(tokenizer, ["who"], max_length=9)
    texts = replace(encoded, padding={"input_ids": 7, "token_type_ids": 1})

    tensors = collate(texts, np.array([0]), padded_length=5)

    assert tensors["input_ids"][0, 3:].tolist() == [7, 7]
    assert tensors["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]
    assert tensors["attention_mask"].tolist() == [[True, True, True, False, False]]
