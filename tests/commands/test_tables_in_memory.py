"""Tables in memory, results and loaded models: what notebooks give and see."""

import os
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from tiny_runs import QUICK, TEXTS

import finetune
from finetune.config.schema import DataConfig
from finetune.data.in_memory import write_table
from finetune.data.load import load_splits
from finetune.errors import UsageError
from finetune.events import ignore
from finetune.files import file_sha256
from finetune.runs.results import RunResults
from finetune.runs.trained import TrainedModel
from finetune.tasks.shown import Shown

OPTIONS = {name: QUICK[name] for name in QUICK if name not in ("data", "max_train_samples")}


@pytest.fixture(scope="module")
def frame() -> pandas.DataFrame:
    """Questions of two classes, with an index of their own."""
    rows = load_splits(DataConfig("questions"), emit=ignore).splits["train"]
    frame = rows.to_pandas()
    frame["label"] = frame["label"].map(rows.features["label"].int2str)
    frame = frame[frame["label"].isin(["HUM", "LOC"])].reset_index(names="number")
    return frame.sample(60, random_state=0).rename(columns={"text": "question"})


@pytest.fixture(scope="module")
def results(
    frame: pandas.DataFrame, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunResults:
    """A run of a DataFrame."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("notebook"))
        return finetune.run(frame, model=tiny_folder, output_dir=Path("run").resolve(), **OPTIONS)


def test_a_run_of_a_dataframe_can_be_evaluated_and_continued_from_anywhere(
    results: RunResults, frame: pandas.DataFrame
) -> None:
    assert set(results.facts.class_names) == {"HUM", "LOC"}
    again = finetune.evaluate(results, device="cpu")
    assert again.scores.metrics == results.test.metrics
    table = Path(results.output_dir).parent / "runs" / "tables"
    [kept] = table.iterdir()
    manifest = (Path(results.output_dir) / "manifest.json").read_text()
    assert f'"{kept}": "{file_sha256(kept)}"' in manifest
    done = finetune.run(resume_from_checkpoint=results)
    assert done.test.metrics == results.test.metrics
    more = finetune.run(resume_from_checkpoint=results, num_train_epochs=3)
    assert more.output_dir != results.output_dir


@pytest.mark.parametrize("kind", ["frame", "rows", "columns", "arrow", "dataset"])
def test_every_kind_of_table_is_read_as_the_same_rows(
    kind: str, frame: pandas.DataFrame, tmp_path: Path
) -> None:
    rows = frame[["question", "label"]]
    dataset = Dataset.from_pandas(rows, preserve_index=False)
    features = Features(question=Value("string"), label=ClassLabel(names=["LOC", "HUM"]))
    given = {
        "frame": rows.astype({"label": "category"}),
        "rows": rows.to_dict("records"),
        "columns": {"question": rows["question"], "label": list(rows["label"])},
        "arrow": dataset.with_format("arrow")[:],
        "dataset": dataset.cast(features),
    }
    path = write_table(given[kind], tmp_path / "tables")
    assert write_table(given[kind], tmp_path / "tables") == path
    loaded = load_splits(DataConfig(str(path)), emit=ignore)
    assert {*loaded.task.class_names} == {"HUM", "LOC"}
    found = {text for split in loaded.splits.values() for text in split["text"]}
    assert found == set(rows["question"])


def test_the_splits_of_a_dataset_are_those_of_the_run(
    frame: pandas.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = Dataset.from_pandas(frame[["question", "label"]], preserve_index=False)
    splits = DatasetDict(train=rows.select(range(40)), test=rows.select(range(40, 60)))
    options: dict[str, Any] = {**OPTIONS, "num_train_epochs": 1, "validation_fraction": 0}
    assert finetune.run(splits, model=tiny_folder, **options).test.samples == 20
    for table in ({"text": ["a", "b"], "label": ["x"]}, ["a text"]):
        with pytest.raises(UsageError, match="can't be read as a table"):
            finetune.run(table)  # type: ignore[arg-type]


def test_predictions_of_a_table_have_its_rows_and_columns(
    results: RunResults, frame: pandas.DataFrame
) -> None:
    rows = frame.head(5).copy()
    rows.loc[rows.index[2], "question"] = None
    found = results.predict(rows, device="cpu")
    assert [one.columns["number"] for one in found] == rows["number"].to_list()
    from_series = finetune.predict(results, frame["question"].head(5), device="cpu")
    assert [one.label for one in from_series][:2] == [one.label for one in found][:2]
    assert [*found.to_pandas()][:3] == ["label", "probability", "text"]
    assert results.predict([], device="cpu") == []


def test_a_loaded_model_is_loaded_once(
    results: RunResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = finetune.load(results, device="cpu")
    monkeypatch.setattr(TrainedModel, "load", None)
    found = [model.predict([text])[0].label for text in TEXTS]
    assert found == [one.label for one in model.predict(TEXTS, all_scores=True)]


def test_results_show_themselves_in_five_lines_and_as_a_table(
    results: RunResults, tiny_folder: Path, tmp_path: Path
) -> None:
    long = finetune.predict(results, ["Who? " * 300] * 30, device="cpu", all_scores=True)
    other = finetune.run(
        Path(results.output_dir).parent / "run" / "config.yaml",
        output_dir=tmp_path / "other",
        seed=7,
    )
    shown: list[Shown] = [
        results,
        results.test,
        long,
        long[0],
        finetune.evaluate(results, device="cpu"),
        finetune.compare([results, other]),
    ]
    for one in shown:
        assert 2 <= len(repr(one).splitlines()) <= 5
        assert len(repr(one)) <= 800
        assert "<table" in one._repr_html_()
        assert len(one.to_pandas()) == len(one.records())
    assert "split test" in repr(results)
    assert f"accuracy {results.test.accuracy:.4g}" in repr(results)
    assert os.fspath(results) == results.output_dir
