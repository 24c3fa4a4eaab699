"""Converts exports of labeling tools to texts and labels."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import pandas

from finetune.data.packed import WORDS
from finetune.errors import DataError

ANSWERS = {"accept", "reject", "ignore"}
OF_LABEL_STUDIO = WORDS["label_studio"].split()
OF_DOCCANO = ["Comments", "annotation_approver"]
MIN_PROBABILITY = 0.5
How = Literal["file", "spread", "uncertain", "rare", "random", "chosen"]
"""Why ``finetune label`` showed a text; ``file``: it had a label, ``chosen``: a person chose it."""


def convert(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the texts and labels of an export; any other table as it is.

    Values come from JSON or from the cells of a CSV. A row without a decision keeps its place, with
    the label None. If a task has several annotations, its rows share one index.
    """
    if _has(frame, "data", dict) and _has(frame, "annotations", list):
        return _convert_tasks(frame)
    if len(about := frame.columns.intersection(OF_LABEL_STUDIO)) > 1:
        return frame.drop(columns=about).apply(_convert_annotations)
    if _has(frame, "answer", str) and ANSWERS.issuperset(frame["answer"].dropna().unique()):
        return _convert_prodigy(frame)
    is_of_doccano = _has(frame, "Comments", list) or "annotation_approver" in frame.columns
    for name in ("cats", "label", "labels", "annotations"):
        if _has(frame, name, dict):  # of spaCy, and others
            labels = _unwrap(frame[name].map(_names_in))
        elif is_of_doccano and _has(frame, name, list):
            labels = _convert_annotations(frame[name])
        else:
            continue
        others = frame.drop(columns=[name, "label", *OF_DOCCANO], errors="ignore")
        return others.assign(label=labels)
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


def _unwrap(lists: pandas.Series) -> pandas.Series:
    """Return labels instead of lists if no row has several."""
    is_list = lists.map(lambda value: isinstance(value, list))
    if (lists[is_list].map(len) > 1).any():
        return lists
    return lists.map(lambda value: next(iter(value), None) if isinstance(value, list) else value)


def _names_in(scores: Any) -> list[str] | None:
    """Return the classes with a high score or a mark."""
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
        raise _no_labels_of_texts()
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
    labels = pandas.DataFrame(answers, tasks.index).apply(_convert_annotations)
    texts = texts.drop(columns=[*labels.columns.intersection(texts.columns)])
    joined = pandas.concat([texts.reset_index(drop=True), labels.reset_index(drop=True)], axis=1)
    return joined.set_axis(tasks.index)


def _results(annotation: Any) -> list[Any]:
    if not isinstance(annotation, Mapping) or annotation.get("was_cancelled"):
        return []
    return [result for result in annotation.get("result", ()) if "from_name" in result]


def _convert_annotations(values: pandas.Series) -> pandas.Series:
    """Return the labels in annotations of Label Studio or doccano; other values as they are."""
    return _unwrap(values.map(_read_annotation, na_action="ignore"))


def _read_annotation(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(('{"', '[{"')):
        with suppress(ValueError):
            value = json.loads(value)
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
        "this export of Prodigy, Label Studio or doccano has labels of parts of texts",
        remedy="export classes of whole texts: textcat or choice of Prodigy, choices of Label"
        " Studio, or text classification of doccano",
    )
