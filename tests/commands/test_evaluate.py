"""``finetune.evaluate`` and ``finetune evaluate``."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from machines import LINUX, simulate
from tiny_runs import Command, at, press_ctrl_c, run_tiny

import finetune
from finetune.errors import UsageError
from finetune.events import Step
from finetune.runs.evaluate import load_split
from finetune.runs.folder import open_run_folder


@pytest.mark.parametrize("name", ["test", "train"])
def test_folder_with_the_name_of_a_split_is_read_as_new_data(
    name: str, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    texts = load_split(open_run_folder(finished_run), "train")["text"].to_pylist()[:3]
    lines = [json.dumps({"text": text, "label": "ABBR"}) for text in texts]
    (tmp_path / name).mkdir()
    (tmp_path / name / "rows.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    outcome = command("evaluate", finished_run, name, "--device", "cpu")
    assert "all of these rows were in training" in outcome.output
    assert f"./{name}, 3 rows" in outcome.output


ERROR_RATE = """
import datasets
import evaluate

class ErrorRate(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        errors = [one != other for one, other in zip(predictions, references)]
        return {"error_rate": sum(errors) / len(errors)}
"""


def test_metric_from_the_evaluate_library_is_computed(
    finished_run: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "error_rate").mkdir()
    (tmp_path / "error_rate" / "error_rate.py").write_text(ERROR_RATE)
    outcome = command(
        "evaluate", finished_run, "--evaluate-metric", tmp_path / "error_rate", "--json"
    )
    assert outcome.code == 0, outcome.errors
    found = json.loads(outcome.output)
    assert found["evaluate_error_rate"] == pytest.approx(1 - found["accuracy"])
    # Later evaluations don't compute it.
    assert "evaluate_error_rate" not in finetune.evaluate(finished_run, device="cpu").to_json()
    with pytest.raises(UsageError, match="evaluate_metric"):
        finetune.evaluate(finished_run, device="cpu", evaluate_metric=str(tmp_path / "missing"))


CLASSES = ("person", "place", "time")


def write_rows(path: Path, rows: Sequence[tuple[str, str]]) -> Path:
    path.write_text("\n".join(["text,label", *(f"{text},{label}" for text, label in rows)]) + "\n")
    return path


def made_up_rows(count: int) -> list[tuple[str, str]]:
    words = ("who is the author", "what is the city", "when was the year")
    return [(f"{words[n % 3]} {n}", CLASSES[n % 3]) for n in range(count)]


@pytest.fixture(scope="module")
def kept_table_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The folder of ``rows.csv`` and of a run on it."""
    folder = tmp_path_factory.mktemp("table")
    data = write_rows(folder / "rows.csv", made_up_rows(90))
    run_tiny(folder / "run", model=tiny_folder, data=str(data), max_steps=3, save_strategy="epoch")
    return folder


@pytest.fixture
def table_run(kept_table_run: Path) -> Path:
    return kept_table_run / "run"


def test_evaluate_and_resume_reject_data_with_appended_rows(
    kept_table_run: Path, tiny_folder: Path, command: Command
) -> None:
    table = kept_table_run / "rows.csv"
    before = table.read_bytes()
    stopped = kept_table_run / "stopped"

    with pytest.raises(finetune.errors.InterruptionError):
        run_tiny(
            stopped, model=tiny_folder, data=str(table), max_train_samples=16, max_steps=3,
            save_strategy="epoch", emit=at(Step, 2, press_ctrl_c),
        )  # fmt: skip
    with table.open("a") as file:
        file.writelines(f"how is the food {n},person\n" for n in range(30))
    try:
        words = (f"changed since the run started: {table}", "the train split", "the test split")
        rejected = command("evaluate", kept_table_run / "run", "--device", "cpu")
        rejected.assert_rejected(3, *words, "RUN FILE")
        resumed = command("run", "--resume-from-checkpoint", stopped)
        resumed.assert_rejected(3, *words[:1], "the test split", "start a new run")
        scores = finetune.evaluate(kept_table_run / "run", data=table, device="cpu").scores
        assert scores.samples == 120
    finally:
        table.write_bytes(before)
    assert command("evaluate", kept_table_run / "run", "--device", "cpu").code == 0
    assert command("run", "--resume-from-checkpoint", stopped).code == 0


def test_training_rows_are_counted_and_excluded(
    table_run: Path, tmp_path: Path, command: Command
) -> None:
    new = [(f"where is it {n}", CLASSES[n % 3]) for n in range(9)]
    data = write_rows(tmp_path / "mixed.csv", made_up_rows(90) + new)
    arguments = ("evaluate", table_run, "--device", "cpu", "--data")
    found = finetune.evaluate(table_run, data=data, device="cpu")
    trained = len(load_split(open_run_folder(table_run), "train"))
    assert (found.scores.samples, found.rows_in_training) == (99, trained)
    assert found.unseen.samples == 99 - trained
    shown = command(*arguments, data).output
    assert f"{trained} of these rows were in training. Without them: " in shown
    rest = write_rows(tmp_path / "new.csv", new)
    assert "in training" not in command(*arguments, rest).output


@pytest.mark.parametrize("command_and_texts", [["evaluate"], ["predict", "Who?"]])
def test_device_can_be_set_by_an_environment_variable(
    command_and_texts: list[str],
    command: Command,
    finished_run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, *texts = command_and_texts
    monkeypatch.setenv("FINETUNE_DEVICE", "gpu")
    command(name, finished_run, *texts).assert_rejected(2, "FINETUNE_DEVICE", "gpu")
    simulate(LINUX, monkeypatch)
    monkeypatch.setenv("FINETUNE_DEVICE", "mps")
    command(name, finished_run, *texts).assert_rejected(4, "MPS")
    assert command(name, finished_run, *texts, "--device", "cpu").code == 0
