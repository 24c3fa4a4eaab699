"""The model guessed for a table, and the message about it."""

from pathlib import Path
from typing import Any

import pyarrow
import pytest

from finetune.commands.flags import load
from finetune.data.dataset import split_table
from finetune.data.load import load_data
from finetune.events import Event, Info, sent_to
from finetune.runs import guess as guess_module
from finetune.runs.guess import MAX_ROWS_PER_CLASS, guess, guess_options, suggest_encoder
from finetune.runs.prepare import choose_method

MULTILINGUAL = "intfloat/multilingual-e5-small"


@pytest.fixture(autouse=True)
def no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guess_module, "measure_tokens", lambda *_: None)


def write(labels: list[str], *, text: str = "Where is it") -> None:
    lines = [f"{text} {number},{label}" for number, label in enumerate(labels)]
    Path("table.csv").write_text("\n".join(["text,label", *lines]), encoding="utf-8")


def guess_model(**options: Any) -> tuple[str, str]:
    """Return the model guessed for the table, and the message about it."""
    events: list[Event] = []
    with sent_to(events.append):
        guessed = guess_options(load(file="table.csv", **options))
    printed = [event.message for event in events if isinstance(event, Info)]
    lines = [line for line in printed if "--model" in line]
    return guessed.config.model.model, "\n".join(lines)


def test_few_rows_select_a_sentence_encoder_and_many_rows_bert() -> None:
    write(["good", "bad"] * 100)
    few = "at most 100 rows per class on average: 90"
    assert guess_model() == ("minilm", f"guessed: --model minilm ({few})")
    write(["good", "bad"] * 150)
    many = "more than 100 rows per class on average: 135"
    assert guess_model() == ("bert-base-uncased", f"guessed: --model bert-base-uncased ({many})")


def test_model_set_by_the_user_is_kept() -> None:
    write(["good", "bad"] * 10)
    assert guess_model(model="roberta-base") == ("roberta-base", "")
    Path("mine.yaml").write_text("model: {max_length: 64}\ndata: {data: table.csv}\n")
    config = guess_options(load(file="mine.yaml")).config
    assert config.model.model == "bert-base-uncased"


@pytest.mark.parametrize("name", ["trec", "questions"])
def test_named_datasets_use_bert(name: str) -> None:
    assert guess_options(load(file=name)).config.model.model == "bert-base-uncased"


@pytest.mark.parametrize(
    ("labels", "task"),
    [([f"{n / 7:.3f}" for n in range(60)], "regression"), (["a|b", "b", "a|c"] * 20, "multi")],
)
def test_tasks_without_few_shot_training_use_bert(labels: list[str], task: str) -> None:
    write(labels)
    model, line = guess_model()
    assert (model, line) == ("bert-base-uncased", f"guessed: --model {model} (the task is {task})")


# 10% is held out for testing and, from 1,000 rows on, 10% for validation.
@pytest.mark.parametrize(
    ("classes", "rows", "options"),
    [
        (2, 222, {}),
        (2, 224, {}),
        (2, 300, {"max_train_samples": 200}),
        (2, 224, {"test_fraction": 0.2}),
        (10, 1_240, {}),
        (10, 1_260, {}),
    ],
)
def test_few_rows_have_the_same_limit_as_few_shot_training(
    classes: int, rows: int, options: dict[str, Any]
) -> None:
    write([f"class {number % classes}" for number in range(rows)])
    config = load(file="table.csv", **options).config
    data = load_data(config.data)
    train = split_table(data.splits, config.data, task=data.task)["train"]
    is_few_shot = choose_method(config, data.task, rows=len(train)).is_contrastive
    assert is_few_shot == (guess_model(**options)[0] == "minilm")
    assert is_few_shot == (len(train) <= MAX_ROWS_PER_CLASS * classes)


def test_unlabeled_texts_determine_language_and_length_but_not_row_count() -> None:
    texts = [f"Die Lieferung kam zu spät {'für ' * 200}{number}," for number in range(900)]
    rows = ["human,HUM", "location,LOC", "city,LOC"]  # class names, as in data without labels
    Path("table.csv").write_text("\n".join(["text,label", *rows, *texts]), encoding="utf-8")
    options = load(file="table.csv").config.data
    values = guess(load_data(options), options, model=None).values
    assert values["model"] == MULTILINGUAL
    assert values["max_length"] > 200


@pytest.mark.parametrize(
    ("text", "few", "many"),
    [
        ("Where is the café that you told me of?", "minilm", "bert-base-uncased"),
        ("Die Lieferung kam zu spät", MULTILINGUAL, "bert-base-multilingual-cased"),
        ("快递太慢了,东西也坏了,我要退货", MULTILINGUAL, "bert-base-chinese"),
        ("ዕቃው ዘግይቶ ደረሰ", MULTILINGUAL, "xlm-roberta-base"),
    ],
)
def test_suggested_model_depends_on_script_and_language(text: str, few: str, many: str) -> None:
    texts = pyarrow.chunked_array([[text] * 20])
    assert suggest_encoder(texts, has_few_rows=True) == few
    assert suggest_encoder(texts, has_few_rows=False) == many
