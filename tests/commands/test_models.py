import json

import pyarrow
import pytest
from tiny_runs import Command

from finetune.commands.init import _suggest_model


def test_encoders_are_listed_with_what_they_take(command: Command) -> None:
    shown = command("models")
    assert shown.code == 0, shown.errors
    minilm = next(line for line in shown.output.splitlines() if line.startswith("minilm"))
    assert all(
        words in minilm for words in ("English", "23", "512", "1.4", "Apache-2.0", "offline")
    )
    models = json.loads(command("models", "--json").output)["models"]
    assert all(one["source"].startswith("https://huggingface.co/") for one in models)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Where is the café that you told me of?", "bert-base-uncased"),
        ("iphone 12 case black 64gb", "bert-base-uncased"),
        ("", "bert-base-uncased"),
        ("Die Lieferung kam zu spät und das Gerät ist beschädigt", "bert-base-multilingual-cased"),
        ("Доставка пришла слишком поздно", "bert-base-multilingual-cased"),
        ("配送が遅れました。返品したいです", "bert-base-multilingual-cased"),
        ("快递太慢了,东西也坏了,我要退货", "bert-base-chinese"),
        ("ዕቃው ዘግይቶ ደረሰ", "xlm-roberta-base"),
    ],
)
def test_the_letters_and_the_language_of_the_texts_propose_a_model(text: str, model: str) -> None:
    assert _suggest_model(pyarrow.chunked_array([[text] * 20])) == model
