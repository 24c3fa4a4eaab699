"""Exports of Prodigy, Label Studio, doccano and spaCy, in each of their formats."""

import io
import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from finetune.config.schema import DataConfig
from finetune.data.labeling_tools import convert
from finetune.data.read import read_file
from finetune.errors import DataError
from finetune.tasks.labels import split_labels

STUDIO = {"annotator": 1, "annotation_id": 7, "created_at": "2024-05-01", "lead_time": 3.5}
OPTIONS = [{"id": 1, "text": "food"}, {"id": 2, "text": "sport"}]


def task(*results: dict[str, Any], **annotation: Any) -> dict[str, Any]:
    named = [{"from_name": "topic", "type": "choices", "value": value} for value in results]
    annotations = [{"id": 1, "result": named, **annotation}]
    return {"id": 1, "data": {"text": "a"}, "annotations": annotations, "total_annotations": 1}


def rows(labels: list[Any], *, name: str = "label", **others: Any) -> list[dict[str, Any]]:
    return [{"text": "a", name: label, **others} for label in labels]


EXPORTS: dict[str, tuple[list[dict[str, Any]] | str, list[Any]]] = {
    "Prodigy textcat": (
        [{"text": "a", "label": name, "answer": answer, "_input_hash": 5}
         for name, answer in (("food", "accept"), ("sport", "reject"), ("sport", "accept"))],
        ["food", None, "sport"],
    ),
    "Prodigy binary": (
        [{"text": "a", "label": "spam", "answer": answer}
         for answer in ("accept", "reject", "ignore")],
        ["spam", "not spam", None],
    ),
    "Prodigy choice": (
        [{"text": "a", "accept": names, "answer": answer, "options": OPTIONS}
         for names, answer in (([1], "accept"), ([2], "accept"), ([1], "ignore"), ([], "accept"))],
        ["food", "sport", None, None],
    ),
    "Prodigy several": (
        [{"text": "a", "accept": names, "answer": "accept"} for names in (["x", "y"], [], ["x"])],
        [["x", "y"], [], ["x"]],
    ),
    "Prodigy cats": (
        [{"text": "a", "cats": {"x": score, "y": 1 - score}, "answer": "accept"}
         for score in (1.0, 0.0)],
        ["x", "y"],
    ),
    "Label Studio JSON": (
        [task({"choices": ["food"]}), task({"choices": ["sport"]}, was_cancelled=True), task()],
        ["food", None, None],
    ),
    "Label Studio ratings": ([task({"rating": 4}), task({"rating": 2})], [4, 2]),
    "Label Studio JSON-MIN": (
        rows([{"choices": ["x", "y"]}, "x"], name="topic", **STUDIO), [["x", "y"], "x"],
    ),
    "Label Studio CSV": (
        'text,topic,annotator,annotation_id,lead_time\n'
        'a,"{""choices"":[""x"",""y""]}",1,7,3.5\na,x,1,8,2\na,,1,9,2\n',
        [["x", "y"], "x", ""],
    ),
    "doccano JSON Lines": (rows([["food"], ["sport"], []], Comments=[]), ["food", "sport", None]),
    "doccano several": (rows([["x", "y"], []], Comments=[]), [["x", "y"], []]),
    "doccano annotations": (
        rows([[{"label": 3, "user": 1}], [{"label": 4}]], name="annotations",
             annotation_approver=None),
        [3, 4],
    ),
    "doccano CSV": ("id,text,label\n1,a,food\n2,a,food#sport\n", ["food", "food#sport"]),
    "spaCy": (rows([{"x": 1.0, "y": 1.0}, {"x": 0.0, "y": 1.0}], name="cats"), [["x", "y"], ["y"]]),
    "questions": (rows(["accept", "Because."], name="answer", label="x"), ["x", "x"]),
}  # fmt: skip


def read(content: list[dict[str, Any]] | str) -> pandas.DataFrame:
    if isinstance(content, str):
        return pandas.read_csv(io.StringIO(content), dtype=str, keep_default_na=False)
    return pandas.DataFrame(json.loads(json.dumps(content)))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_loaded_from_its_file(name: str, suffix: str, tmp_path: Path) -> None:
    content, labels = EXPORTS[name]
    if isinstance(content, str):
        path = tmp_path / "export.csv"
        path.write_text(content)
    else:
        path = tmp_path / f"export{suffix}"
        lines = [json.dumps(record) for record in content]
        path.write_text(f"[{', '.join(lines)}]" if suffix == ".json" else "\n".join(lines))
    table = read_file(path, DataConfig()).columns
    column = "topic" if "topic" in table.column_names else "label"
    found = [split_labels(cell, None) for cell in table[column].to_pylist()]
    plain = [own if isinstance(own, list) else [str(own)] * bool(own) for own in labels]
    assert found == plain


def test_each_annotation_of_a_task_is_a_row_with_its_index() -> None:
    twice = task({"choices": ["x"]})
    twice["annotations"] *= 2
    converted = convert(read([task({"choices": ["y"]}), twice]))
    assert [*converted["topic"]] == ["y", "x", "x"]
    assert [*converted.index] == [0, 1, 1]


@pytest.mark.parametrize(
    ("content", "tool"),
    [
        ([{"text": "a", "spans": [{"start": 0}], "answer": "accept"}], "Prodigy"),
        ([task({"start": 0, "end": 1, "labels": ["x"]})], "Label Studio"),
        (rows([[{"start": 0, "end": 1}]], name="topic", **STUDIO), "Label Studio"),
        (rows([[[0, 1, "x"]]], Comments=[]), "doccano"),
    ],
)
def test_labels_of_parts_of_texts_are_refused(content: list[dict[str, Any]], tool: str) -> None:
    with pytest.raises(DataError, match=tool) as raised:
        convert(read(content))
    assert "export" in raised.value.remedy
