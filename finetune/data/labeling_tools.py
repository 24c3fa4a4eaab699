"""Converts exports of labeling tools to texts and labels."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import pandas

from finetune.errors import DataError

ANSWERS = {"accept", "reject", "ignore", ""}
# Columns that these tools write next to the text. Other Prodigy columns start with _.
OF_LABEL_STUDIO = [
    *("annotator", "annotation_id", "lead_time", "created_at", "updated_at", "completed_by"),
    *("agreement", "cancelled_annotations", "total_annotations", "total_predictions"),
]
OF_PRODIGY = ["answer", "accept", "options", "cats", "label", "spans", "tokens", "meta", "config"]
OF_DOCCANO = ["Comments", "annotation_approver"]
MIN_PROBABILITY = 0.5
How = Literal["file", "spread", "uncertain", "rare", "random", "chosen"]
"""Why ``finetune label`` showed a text. ``file``: it had a label; ``chosen``: the user chose it."""


def convert(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the texts and labels of an export, or any other table unchanged.

    Nested values are Python objects, Arrow lists and structs, or JSON cells. A row without a
    decision keeps its position, with the label None. If a task has several annotations, its rows
    share one index.
    """
    if _has(frame, "data", dict) and _has(frame, "annotations", list):
        return _convert_tasks(frame)
    if len(about := frame.columns.intersection(OF_LABEL_STUDIO)) > 1:
        return frame.drop(columns=about).apply(_convert_annotations)
    answers = frame["answer"].dropna() if _has(frame, "answer", str) else ["other"]
    is_of_prodigy = ANSWERS.issuperset(map(str.lower, answers))
    if is_of_prodigy and len(frame.columns.intersection(OF_PRODIGY)) > 1:
        return _convert_prodigy(frame)
    is_of_doccano = _has(frame, "Comments", list) or "annotation_approver" in frame.columns
    for name in ("cats", "label", "labels", "annotations"):
        if _has(frame, name, dict) and _objects(frame[name].dropna()).map(_are_scores).all():
            labels = _unwrap(_objects(frame[name]).map(_names_in, na_action="ignore"))
        elif is_of_doccano and _has(frame, name, list):
            labels = _convert_annotations(frame[name])
        else:
            continue
        others = frame.drop(columns=[name, "label", *OF_DOCCANO], errors="ignore")
        return others.assign(label=labels)
    return frame


def _has(frame: pandas.DataFrame, name: str, kind: type) -> bool:
    """Return whether a column contains values, all of the given type."""
    if name not in frame.columns or frame[name].ndim > 1:
        return False
    values = frame[name].dropna()
    if not len(values) or not isinstance(_parsed(values.iloc[0]), kind):
        return False
    return bool(_objects(values).map(lambda value: isinstance(value, kind)).all())


def _objects(values: pandas.Series) -> pandas.Series:
    """Return values as Python objects, with None for missing values."""
    objects = [None if value is pandas.NA else _parsed(value) for value in values]
    return pandas.Series(objects, values.index, dtype=object)


def _parsed(value: Any) -> Any:
    """Parse a JSON list or object in a text. Return other values unchanged."""
    if isinstance(value, str) and value.startswith(('{"', "[{", '["', "[[")):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _unwrap(lists: pandas.Series) -> pandas.Series:
    """Return labels instead of lists if no row has several labels and some row has one."""
    is_list = lists.map(lambda value: isinstance(value, list))
    if lists[is_list].map(len).max() != 1:
        return lists
    return lists.map(lambda value: next(iter(value), None) if isinstance(value, list) else value)


def _are_scores(scores: Mapping[str, Any]) -> bool:
    return all(isinstance(score, int | float | None) for score in scores.values())


def _names_in(scores: Mapping[str, Any]) -> list[str]:
    """Return the classes with a high score or a mark. Arrow adds None for classes of other rows."""
    return [name for name, score in scores.items() if (score or 0) >= MIN_PROBABILITY]


def _convert_prodigy(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the accepted labels. With only one label, rejected rows form a class."""
    columns = {name: _objects(frame[name]) for name in frame.columns.intersection(OF_PRODIGY)}
    answer = columns["answer"].str.lower()
    if "accept" in columns:
        options = columns.get("options", [None] * len(frame))
        chosen = [_chosen(*row) for row in zip(columns["accept"], options, strict=True)]
        labels = pandas.Series(chosen, frame.index, dtype=object)
    elif _has(frame, "cats", dict):
        labels = columns["cats"].map(_names_in, na_action="ignore")
    elif _has(frame, "label", str):
        labels = columns["label"]
        if labels.nunique() == 1 and answer.eq("reject").any():
            labels = labels.where(answer.ne("reject"), f"not {labels.dropna().iloc[0]}")
            answer = answer.where(answer.ne("reject"), "accept")
    else:
        raise _no_labels_of_texts()
    others = [name for name in frame if name not in OF_PRODIGY and not name.startswith("_")]
    return frame[others].assign(label=_unwrap(labels.where(answer.eq("accept"), None)))


def _chosen(accept: Any, options: Any) -> Any:
    """Return the texts of the accepted options. Most IDs are already names."""
    if not isinstance(accept, list):
        return accept
    listed = options if isinstance(options, list) else []
    texts = {option["id"]: option.get("text") for option in listed}
    is_named = all(isinstance(choice, str) and not choice.isdigit() for choice in accept)
    return [str(choice if is_named else texts.get(choice) or choice) for choice in accept]


def _convert_tasks(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return one row per annotation in Label Studio JSON, with one column per question."""
    tasks = frame[["data", "annotations"]].apply(_objects).explode("annotations")
    answers = [
        {result["from_name"]: result.get("value") for result in _results(annotation)}
        for annotation in tasks["annotations"]
    ]
    texts = pandas.DataFrame([*tasks["data"]], tasks.index)
    labels = pandas.DataFrame(answers, tasks.index).apply(_convert_annotations)
    texts = texts.drop(columns=[*labels.columns.intersection(texts.columns)])
    joined = pandas.concat([texts.reset_index(drop=True), labels.reset_index(drop=True)], axis=1)
    return joined.set_axis(tasks.index)


def _results(annotation: Any) -> list[Any]:
    if not isinstance(annotation, Mapping) or annotation.get("was_cancelled"):
        return []
    return [result for result in annotation.get("result") or () if result.get("from_name")]


def _convert_annotations(values: pandas.Series) -> pandas.Series:
    """Return the labels in Label Studio or doccano annotations, and other values unchanged."""
    return _unwrap(_objects(values).map(_read_annotation, na_action="ignore"))


def _read_annotation(value: Any) -> Any:
    if isinstance(value, Mapping):  # in Arrow, each struct has all keys
        value = {key: inner for key, inner in value.items() if inner is not None} or None
    match value:
        case {"choices": list(names)}:
            return names
        case {"taxonomy": list(paths)}:
            return [" > ".join(path) for path in paths]
        case {"rating": number} | {"number": number}:
            return number
        case {"start": _, "end": _} | [{"start": _, "end": _}, *_] | [list(), *_]:
            raise _no_labels_of_texts()
        case [{"label": _}, *_]:
            return [item.get("label") for item in value]
    return value


def _no_labels_of_texts() -> DataError:
    return DataError(
        "this Prodigy, Label Studio or doccano export contains span labels",
        remedy="export classes of whole texts: Prodigy textcat or choice, Label Studio choices,"
        " or doccano text classification",
    )
