"""Functions that write small tables, folders, archives and workbooks, and load them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import openpyxl

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.dataset import LoadedData
from finetune.data.load import load_data
from finetune.data.read import read_source
from finetune.data.stream import Texts
from finetune.evaluation.prediction_file import PredictionFile
from finetune.events import Event, Info, WarningMessage, sent_to
from finetune.tasks.base import Prediction


@dataclass
class Outcome:
    """The loaded data, the texts and labels of each split, and the emitted messages."""

    loaded: LoadedData
    rows: dict[str, list[tuple[str, Any]]]
    messages: str
    warnings: list[str]


@contextmanager
def messages() -> Iterator[list[str]]:
    """Collect the messages emitted in this context."""
    collected: list[str] = []
    with sent_to(lambda event: collected.append(getattr(event, "message", ""))):
        yield collected


def load(data: Path | str, **options: Any) -> Outcome:
    events: list[Event] = []
    with sent_to(events.append):
        loaded = load_data(DataConfig(str(data), **options))
    rows = {}
    for split, table in loaded.splits.items():
        labels = loaded.task.to_json(loaded.task.labels(table["label"]))
        rows[split] = [*zip(table["text"].to_pylist(), labels, strict=True)]
    shown = [event for event in events if isinstance(event, Info | WarningMessage)]
    warnings = [event.message for event in shown if isinstance(event, WarningMessage)]
    return Outcome(loaded, rows, "\n".join(event.message for event in shown), warnings)


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def write_folder(path: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        write(path / name, content)
    return path


def write_zip(path: Path, files: Mapping[str, str | bytes]) -> Path:
    path = path.with_suffix(path.suffix or ".zip")
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_workbook(path: Path, sheets: Mapping[str, Sequence[Sequence[object]]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(Path(name).stem)
        for row in rows:
            sheet.append(list(row))
    path = path.with_suffix(".xlsx")
    book.save(path)
    return path


def add_predictions(source: Path, output: Path, values: Mapping[str, Any], **options: Any) -> Path:
    """Add the same prediction to each row. The options are fields of ``OtherData``."""
    table = read_source(source, OtherData(**options))
    answers = PredictionFile(output, source=source)
    [texts] = answers.reading([Texts([""] * len(table.frame), source=table)])
    answers.add([Prediction(text, values) for text in texts.texts])
    answers.write()
    return output
