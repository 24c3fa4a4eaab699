"""Converts exports of labeling tools to texts and labels."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pandas

from finetune.data.packed import WORDS
from finetune.errors import DataError

ANSWERS = {"accept", "reject", "ignore"}
ABOUT_ANNOTATIONS = WORDS["label_studio"].split()
MIN_PROBABILITY = 0.5


def convert(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the texts and labels of an export; any other table as it is.

    Values come from JSON or from the cells of a CSV. A row without a decision keeps its place, with
    the label None. If a task has several annotations, its rows share one index.
    """
    if _has(frame, "data", dict) and _has(frame, "annotations", list):
        return _convert_tasks(frame)
    if len(about := frame.columns.intersection(ABOUT_ANNOTATIONS)) > 1:
        return frame.drop(columns=about).apply(_convert_results)
    if _has(frame, "answer", str) and ANSWERS.issuperset(frame["answer"].dropna().unique()):
        return _convert_prodigy(frame)
    for name in ("cats", "labels", "label"):  # of spaCy, and others
        if _has(frame, name, dict):
            return _replace_column(frame, name, frame[name].map(_names_in))
    if _has(frame, "Comments", list) or "annotation_approver" in frame.columns:
        return _convert_doccano(frame)
    return frame


def _has(frame: pandas.DataFrame, name: str, kind: type) -> bool:
    """Return whether a column has values, and all have the given type."""
    if name not in frame.columns or frame[name].ndim > 1:
        return False
    values = frame[name].dropna()
    if not len(values) or not isinstance(values.iloc[0], kind):
        return False
    is_typed = isinstance(values.dtype, pandas.ArrowDtype)
    return is_typed or bool(values.map(lambda value: isinstance(value, kind)).all())


def _replace_column(frame: pandas.DataFrame, name: str, labels: pandas.Series) -> pandas.DataFrame:
    others = frame.drop(columns={name, "label"} & {*frame.columns})
    return others.assign(label=_unwrap(labels))


def _unwrap(lists: pandas.Series) -> pandas.Series:
    """Return labels instead of lists if no row has several."""
    is_list = lists.map(lambda value: isinstance(value, list))
    if (lists[is_list].map(len) > 1).any():
        return lists
    return lists.map(lambda value: next(iter(value), None) if isinstance(value, list) else value)


def _names_in(scores: Any) -> list[str] | None:
    if not isinstance(scores, Mapping):
        return None
    if not all(isinstance(score, int | float) for score in scores.values()):
        raise DataError(
            f"the label {str(scores)[:60]!r} has no number for each class",
            remedy="write labels as lists of names, or as objects of 0 and 1",
        )
    return [name for name, score in scores.items() if float(score) >= MIN_PROBABILITY]


def _convert_prodigy(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the accepted labels; if there is only one label, rejected rows form a class."""
    answer = frame["answer"]
    if "accept" in frame.columns:
        options = frame["options"] if "options" in frame.columns else [None] * len(frame)
        chosen = [_chosen(*row) for row in zip(frame["accept"], options, strict=True)]
        labels = pandas.Series(chosen, frame.index, dtype=object)
    elif _has(frame, "cats", dict):
        labels = frame["cats"].map(_names_in)
    elif _has(frame, "label", str):
        labels = frame["label"]
        if labels.nunique() == 1 and answer.eq("reject").any():
            labels = labels.where(answer.ne("reject"), f"not {labels.dropna().iloc[0]}")
            answer = answer.where(answer.ne("reject"), "accept")
    else:
        raise DataError(
            "this export of Prodigy has no labels of whole texts",
            remedy="export a dataset of textcat.manual, textcat.teach or choice",
        )
    return frame[["text"]].assign(label=_unwrap(labels.where(answer.eq("accept"), None)))


def _chosen(accept: Any, options: Any) -> list[str] | None:
    """Return the texts of the accepted options; most ids are already names."""
    if not isinstance(accept, list):
        return None
    listed = options if isinstance(options, list) else []
    texts = {option["id"]: option.get("text") for option in listed}
    is_named = all(isinstance(choice, str) and not choice.isdigit() for choice in accept)
    return [str(choice if is_named else texts.get(choice) or choice) for choice in accept]


def _convert_tasks(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return one row per annotation of Label Studio JSON, with one column per question."""
    tasks = frame[["data", "annotations"]].explode("annotations")
    answers = [
        {result["from_name"]: result.get("value") for result in _results(annotation)}
        for annotation in tasks["annotations"]
    ]
    texts = pandas.DataFrame([*tasks["data"]], tasks.index)
    labels = pandas.DataFrame(answers, tasks.index).apply(_convert_results)
    texts = texts.drop(columns=[*labels.columns.intersection(texts.columns)])
    joined = pandas.concat([texts.reset_index(drop=True), labels.reset_index(drop=True)], axis=1)
    return joined.set_axis(tasks.index)


def _results(annotation: Any) -> list[Any]:
    if not isinstance(annotation, Mapping) or annotation.get("was_cancelled"):
        return []
    return [result for result in annotation.get("result", ()) if "from_name" in result]


def _convert_results(values: pandas.Series) -> pandas.Series:
    """Return the choice, or choices, in each answer of a Label Studio column."""
    return _unwrap(values.map(_result))


def _result(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(('{"', '[{"')):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        match {**value}:
            case {"choices": list(names)}:
                return names
            case {"taxonomy": list(paths)}:
                return [" > ".join(path) for path in paths]
            case {"rating": number} | {"number": number}:
                return number
    is_span = isinstance(value, Mapping) and {"start", "end"} <= value.keys()
    if is_span or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        raise DataError(
            "this export of Label Studio has labels of parts of texts",
            remedy="export a project whose labels are choices for whole texts",
        )
    return value


def _convert_doccano(frame: pandas.DataFrame) -> pandas.DataFrame:
    frame = frame.drop(columns=["Comments", "annotation_approver"], errors="ignore")
    for name in ("label", "labels", "annotations"):
        if _has(frame, name, list):
            labels = frame[name].map(_labels_in, na_action="ignore")
            return _replace_column(frame, name, labels)
    return frame


def _labels_in(annotations: list[Any]) -> list[Any]:
    """Return labels that are names, or objects with the number of a label."""
    if any(isinstance(label, list) for label in annotations):
        raise DataError(
            "this export of doccano has labels of parts of texts",
            remedy="export a project of text classification",
        )
    return [label.get("label") if isinstance(label, Mapping) else label for label in annotations]
