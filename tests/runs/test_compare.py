import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import Command, copy_run

import finetune
from finetune.errors import NotARunError, UsageError
from finetune.events import Event, WarningMessage
from finetune.files import SCHEMA_VERSION, read_json, read_jsonl, write_json, write_jsonl


def change_json(path: Path, **changes: Any) -> None:
    write_json(path, read_json(path) | changes)


@pytest.fixture
def right(finished_run: Path) -> list[str]:
    """The true class of each test row."""
    return [row["label"] for row in read_jsonl(finished_run / "predictions.jsonl")]


def test_rows_that_only_one_run_gets_right_are_counted_and_shown(
    finished_run: Path, right: list[str], tmp_path: Path
) -> None:
    rows = read_jsonl(finished_run / "predictions.jsonl")
    wrong = ["HUM" if label != "HUM" else "LOC" for label in right]
    # The first ten are correct, the next ten wrong, and the rest unchanged.
    other = copy_run(finished_run, tmp_path / "other", answers=right[:10] + wrong[10:20])
    found = finetune.compare(finished_run, other, limit=3).groups[0].runs[1].versus_reference

    assert found is not None
    gained = [row for row in rows[:10] if row["predicted"] != row["label"]]
    lost = [row for row in rows[10:20] if row["predicted"] == row["label"]]
    assert (found.better, found.worse) == (len(gained), len(lost))
    assert len(found.better_rows) == 3
    # The most confident mistakes are listed first.
    surest = max(gained, key=lambda row: row["probability"])
    shown = found.better_rows[0]
    assert (shown["text"], shown["run"]) == (surest["text"], surest["label"])
    assert shown["row"] == surest["row"]


def test_loss_difference_has_an_interval(finished_run: Path, tmp_path: Path) -> None:
    rows = read_jsonl(finished_run / "predictions.jsonl")
    results = read_json(finished_run / "all_results.json")
    assert results["test_loss"] == pytest.approx(np.mean([row["loss"] for row in rows]))
    worse = copy_run(finished_run, tmp_path / "worse")
    write_jsonl(worse / "predictions.jsonl", [row | {"loss": row["loss"] + 1} for row in rows])
    change_json(worse / "all_results.json", test_loss=results["test_loss"] + 1)

    versus = finetune.compare(finished_run, worse).groups[0].runs[1].versus_reference
    assert versus is not None
    loss = versus.differences["loss"]
    assert [loss.low, loss.high] == pytest.approx([1, 1])


def test_reference_can_be_the_best_run_on_validation(finished_run: Path, tmp_path: Path) -> None:
    for name, accuracy in (("a", 0.5), ("b", 0.9), ("c", 0.7)):
        change_json(copy_run(finished_run, tmp_path / name) / "all_results.json",
                    eval_accuracy=accuracy, eval_macro_f1=accuracy)  # fmt: skip
    [found] = finetune.compare(tmp_path, reference="best").groups
    assert found.reference == "b"
    assert [run.versus_reference is None for run in found.runs] == [False, True, False]
    # Cross-validated metrics are ignored.
    change_json(tmp_path / "b" / "all_results.json", eval_kind="cross-validated")
    with pytest.raises(UsageError, match="held-out") as caught:
        finetune.compare(tmp_path, reference="best")
    assert "validation_fraction" in caught.value.remedy


def test_runs_that_share_few_test_rows_form_groups(finished_run: Path, tmp_path: Path) -> None:
    rows = read_jsonl(finished_run / "predictions.jsonl")
    others = [row | {"text": f"Tell me, {row['text']}"} for row in rows]
    for name, tested in (("a", rows), ("b", others[20:] + rows[:20]), ("c", rows[::-1])):
        copy_run(finished_run, tmp_path / name, rows=tested)
    events: list[Any] = []
    groups = finetune.compare(tmp_path, emit=events.append).groups
    # The order of the rows doesn't matter.
    assert [[run.name for run in group.runs] for group in groups] == [["a", "c"], ["b"]]
    assert [bool(group.verdict) for group in groups] == [True, False]
    assert [[*group.notes] for group in groups] == [[], []]
    versus = groups[0].runs[1].versus_reference
    assert versus is not None
    assert (versus.better, versus.worse, versus.differences["accuracy"].high) == (0, 0, 0)
    [warning] = events
    assert "2 different sets of rows" in warning.message
    assert "--test-file" in warning.remedy
    # Two runs are compared on their common rows.
    [group] = finetune.compare(tmp_path / "a", tmp_path / "b").groups
    assert group.samples == 20
    assert group.notes == ["Only the 20 test rows that all runs share are compared."]
    copy_run(finished_run, tmp_path / "d", rows=others)
    assert len(finetune.compare(tmp_path / "a", tmp_path / "d").groups) == 2


def test_runs_before_and_after_corrections_use_the_corrected_labels(
    finished_run: Path, right: list[str], tmp_path: Path
) -> None:
    rows = read_jsonl(finished_run / "predictions.jsonl")
    known, others = sorted({*right}), [dict(row) for row in rows]
    for row in others[:12]:
        row["label"] = next(name for name in known if name != row["label"])
    before = copy_run(finished_run, tmp_path / "before", rows=others, answers=right)
    # Five rows were dropped.
    options = {"rows": rows[:-5][::-1], "corrections": "suspects.csv"}
    after = copy_run(finished_run, tmp_path / "after", answers=right[-6::-1], **options)
    for paths in ((before, after), (after, before)):
        [group] = finetune.compare(*paths).groups
        assert (group.samples, len(group.notes)) == (265, 2)
        assert group.notes[1] == (
            "12 of 265 labels differ between runs. All runs are compared with the labels "
            f"of {after}."
        )
        assert [run.metrics["accuracy"] for run in group.runs] == [1, 1]
        assert "loss" not in group.runs[0].metrics


def test_renamed_classes_count_as_correct(finished_run: Path, tmp_path: Path) -> None:
    rows = read_jsonl(finished_run / "predictions.jsonl")
    text = (finished_run / "model/config.json").read_text()
    before, after = (copy_run(finished_run, tmp_path / name) for name in ("before", "after"))
    change = {"label": "PERSON", "predicted": "PERSON"}
    renamed = [row | {key: new for key, new in change.items() if row[key] == "HUM"} for row in rows]
    write_jsonl(after / "predictions.jsonl", renamed)
    (after / "model/config.json").write_text(text.replace('"HUM"', '"PERSON"'))
    [group] = finetune.compare(before, after).groups
    assert group.runs[0].metrics == group.runs[1].metrics
    assert "PERSON" in group.task.class_names
    assert "HUM" in group.task.class_names


def test_equal_texts_are_matched_in_any_order(finished_run: Path, tmp_path: Path) -> None:
    rows = read_jsonl(finished_run / "predictions.jsonl")
    repeated = [row | {"text": "equal", "text_pair": str(n // 9)} for n, row in enumerate(rows)]
    for name, tested in (("a", repeated), ("b", repeated[::-1])):
        copy_run(finished_run, tmp_path / name, rows=tested)
    [group] = finetune.compare(tmp_path).groups
    assert (group.samples, group.notes) == (len(rows), [])


def test_folds_are_compared_as_one_run_on_all_rows(
    command: Command, finished_run: Path, right: list[str], tmp_path: Path
) -> None:
    rows = read_jsonl(finished_run / "predictions.jsonl")
    for name, answers in (("before", []), ("after", right)):
        for fold, part in ((1, slice(0, 100)), (2, slice(100, None))):
            copy_run(finished_run, tmp_path / name / f"fold-{fold}",
                     rows=rows[part], answers=answers[part])  # fmt: skip
        whole = copy_run(finished_run, tmp_path / "whole", answers=answers)
        scores = read_json(whole / "all_results.json")
        test = {key[5:]: value for key, value in scores.items() if key.startswith("test_")}
        content = {"folds": [1, 2], "best": None, "test": test}
        write_json(tmp_path / name / "folds.json", content)
        shutil.copy(whole / "predictions.jsonl", tmp_path / name)
        shutil.rmtree(whole)
    for paths in ([tmp_path / "before", tmp_path / "after"], [tmp_path, "--reference", "first"]):
        outcome = command("compare", *paths, "--json")
        [group] = json.loads(outcome.output)["groups"]
        assert {run["name"] for run in group["runs"]} == {"before", "after"}
        assert group["samples"] == len(rows)
        [versus] = filter(None, (run["versus_reference"] for run in group["runs"]))
        errors = sum(row["predicted"] != row["label"] for row in rows)
        assert max(versus["better"], versus["worse"]) == errors
    # A single fold is compared with all folds on its rows.
    [group] = finetune.compare(tmp_path / "before", tmp_path / "after" / "fold-1").groups
    assert group.samples == 100


def test_seeds_of_one_configuration_form_one_row_with_mean_and_spread(
    finished_run: Path, right: list[str], tmp_path: Path
) -> None:
    for seed, answers in ((1, right), (2, right[:200])):
        copy_run(
            finished_run, tmp_path / f"good-{seed}", answers=answers, seed=seed, label_smoothing=0.3
        )
    poor = copy_run(finished_run, tmp_path / "poor")
    [group] = finetune.compare(tmp_path).groups
    good = group.runs[0]
    assert (good.name, good.seeds) == ("good-1 (2 seeds)", 2)
    both = [
        read_json(tmp_path / f"good-{seed}/all_results.json")["test_accuracy"] for seed in (1, 2)
    ]
    assert good.metrics["accuracy"] == pytest.approx(np.mean(both))
    assert good.spread == pytest.approx(np.std(both, ddof=1))
    assert group.verdict == "Use good-1 (2 seeds): its difference from poor is significant."
    versus = group.runs[1].versus_reference
    assert versus is not None
    assert versus.p_value is None
    # On their own, the seeds are separate runs.
    [alone] = finetune.compare(tmp_path / "good-1", tmp_path / "good-2").groups
    assert [run.seeds for run in alone.runs] == [1, 1]
    # A further run can be equal to one of the seeds.
    again = copy_run(finished_run, tmp_path / "more" / "again", answers=right, seed=1,
                     label_smoothing=0.3)  # fmt: skip
    for paths in ((tmp_path, again), (again, tmp_path)):
        [three] = finetune.compare(*paths).groups
        assert {run.seeds for run in three.runs} == {1, 2}
        assert len(three.runs) == 3
    # The best run on validation rows is chosen by the mean of its seeds.
    for name, accuracy in (("good-1", 0.9), ("good-2", 0.3), ("poor", 0.7)):
        change_json(tmp_path / name / "all_results.json", eval_accuracy=accuracy,
                    eval_macro_f1=accuracy, eval_kind="held out")  # fmt: skip
    assert finetune.compare(tmp_path, reference="best").groups[0].reference == "poor"
    [same] = finetune.compare(poor, copy_run(finished_run, tmp_path / "again")).groups
    assert same.verdict == "poor and again can't be told apart on 270 rows."


def test_folder_is_replaced_by_its_finished_runs_without_duplicates(
    finished_run: Path, tmp_path: Path
) -> None:
    for name in ("seed-10", "seed-9", "running"):
        copy_run(finished_run, tmp_path / name)
    (tmp_path / "running" / "all_results.json").unlink()
    (tmp_path / "best").symlink_to("seed-9")
    (tmp_path / "notes.txt").write_text("none of the runs")
    events: list[Event] = []
    found = finetune.compare(tmp_path / "seed-9", tmp_path, emit=events.append)

    assert [run.name for run in found.groups[0].runs] == ["seed-9", "seed-10"]
    [warning] = events
    assert isinstance(warning, WarningMessage)
    assert "running" in warning.message


@pytest.mark.parametrize("damage", ["cut", "unknown class", "running"])
def test_compare_reports_damaged_run(damage: str, finished_run: Path, tmp_path: Path) -> None:
    other = copy_run(finished_run, tmp_path / "other")
    file, rows = other / "predictions.jsonl", read_jsonl(finished_run / "predictions.jsonl")
    if damage == "running":
        (other / "all_results.json").unlink()
    else:
        rows[0] |= {"predicted": "FISH"} if damage == "unknown class" else {}
        write_jsonl(file, rows[:-1] if damage == "cut" else rows)
    with pytest.raises(NotARunError, match="other"):
        finetune.compare(finished_run, other)


@pytest.fixture
def other(finished_run: Path, right: list[str], tmp_path: Path) -> Path:
    """A run with a different seed that predicts all test rows correctly."""
    return copy_run(finished_run, tmp_path / "other", answers=right, seed=7)


def test_tables_of_metrics_rows_and_options_fit_80_columns(
    command: Command, finished_run: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = command("compare", finished_run, other, "--limit", 2)
    assert outcome.code == 0, outcome.errors
    lines = outcome.output.splitlines()
    assert "270 test rows of questions" in lines
    assert lines[-1] == "Use other: its difference from finished is significant."
    assert any(line.split()[:2] == ["other", "100.0%"] for line in lines)
    assert "seed    42        7" in [line.rstrip() for line in lines]
    assert any(line.startswith("2 of ") for line in lines)
    titles = lines.index("Only other correct")
    assert max(map(len, lines[:titles])) <= 80


def test_json_output_is_one_object_with_a_schema_version(
    command: Command, finished_run: Path, other: Path
) -> None:
    outcome = command("compare", finished_run, other, "--json")
    [line] = outcome.output.splitlines()
    found = json.loads(line)
    assert found["schema_version"] == SCHEMA_VERSION
    [found] = found["groups"]
    assert (found["reference"], found["options"]) == ("finished", {"seed": [42, 7]})
    first, second = found["runs"]
    assert first["versus_reference"] is None
    difference = second["versus_reference"]["differences"]["accuracy"]
    assert difference["value"] == second["metrics"]["accuracy"] - first["metrics"]["accuracy"] > 0
    assert difference["low"] < difference["value"] < difference["high"]
