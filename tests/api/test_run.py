import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TEXTS, Command, flags, have_same_bits, run_tiny, weights_of

import finetune
from finetune.errors import ConfigurationInvalid, NotARun, UsageError
from finetune.files import read_json


def test_the_package_offers_its_verbs_and_nothing_that_is_not_there() -> None:
    assert {"run", "evaluate", "predict"} <= set(finetune.__all__)
    assert all(callable(getattr(finetune, name)) for name in finetune.__all__)
    with pytest.raises(AttributeError, match="fine_tune"):
        finetune.fine_tune  # noqa: B018


def test_run_returns_what_it_writes_and_where(tiny_folder: Path, tmp_path: Path) -> None:
    results = run_tiny(tmp_path / "run", model=tiny_folder, max_steps=1)
    assert results.pop("output_dir") == str(tmp_path / "run")
    assert results == read_json(tmp_path / "run" / "all_results.json")


def test_run_is_the_command(
    tiny_folder: Path, finished_run: Path, tmp_path: Path, command: Command
) -> None:
    outcome = command("run", "--model", tiny_folder, "--output-dir", tmp_path / "run", *flags())
    assert outcome.code == 0, outcome.errors
    assert have_same_bits(weights_of(tmp_path / "run"), weights_of(finished_run))


def test_a_configuration_may_be_a_file_with_options_on_top(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: {data: questions}\ntraining: {max_steps: 5, seed: 3}")
    results = finetune.run(
        str(file),
        model=str(tiny_folder),
        device="cpu",
        max_steps=1,
        output_dir=str(tmp_path / "run"),
        assignments=["data.max_train_samples=16"],
    )
    assert (results["train_samples"], results["epoch"]) == (16, 1.0)
    assert "seed: 3\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_folders_may_be_paths(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("training: {max_steps: 1}")
    paths: dict[str, Any] = {"model": tiny_folder, "output_dir": tmp_path / "run"}
    results = finetune.run(file, data="questions", device="cpu", max_train_samples=16, **paths)
    assert Path(results["output_dir"]) == tmp_path / "run"


@pytest.mark.parametrize("options", [{"batchsize": 8}, {"learning_rte": 1e-5}, {"freeze": True}])
def test_an_option_that_does_not_exist_is_refused_before_any_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationInvalid, match=r"unknown option .* finetune.run\(\)"):
        finetune.run(**options)


def test_a_wrong_value_is_refused_before_any_work() -> None:
    with pytest.raises(ConfigurationInvalid, match="batch_size"):
        finetune.run(batch_size=0)


def test_predict_answers_each_text_in_order(finished_run: Path) -> None:
    answers = finetune.predict(finished_run, TEXTS, device="cpu")
    assert [answer["text"] for answer in answers] == TEXTS
    classes = read_json(finished_run / "all_results.json")["class_names"]
    for answer in answers:
        assert answer["label"] in classes
        assert 1 / len(classes) <= answer["probability"] <= 1


def test_predict_answers_the_test_split_as_the_run_did(finished_run: Path) -> None:
    lines = (finished_run / "predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    answers = finetune.predict(finished_run, [row["text"] for row in rows], device="cpu")
    assert [answer["label"] for answer in answers] == [row["predicted"] for row in rows]
    for answer, row in zip(answers, rows, strict=True):
        assert answer["probability"] == pytest.approx(row["probability"], abs=1e-6)


def test_the_company_of_a_text_hardly_changes_its_answer(finished_run: Path) -> None:
    together = finetune.predict(finished_run, [*TEXTS, "word " * 60], device="cpu")
    for text, answer in zip(TEXTS, together, strict=False):
        [alone] = finetune.predict(finished_run, [text], device="cpu")
        assert alone["label"] == answer["label"]
        assert alone["probability"] == pytest.approx(answer["probability"], abs=1e-5)


def test_no_texts_have_no_answers(finished_run: Path) -> None:
    assert finetune.predict(finished_run, [], device="cpu") == []


def test_an_empty_and_an_endless_text_have_answers(finished_run: Path) -> None:
    answers = finetune.predict(finished_run, ["", " ", "word " * 10_000], device="cpu")
    assert len(answers) == 3


def test_a_text_in_place_of_texts_is_not_taken_for_its_letters(finished_run: Path) -> None:
    with pytest.raises(UsageError):
        finetune.predict(finished_run, "Who wrote Faust?", device="cpu")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_evaluate_returns_the_figures_of_a_split(split: str, finished_run: Path) -> None:
    metrics = finetune.evaluate(finished_run, split=split, device="cpu")
    assert metrics.keys() >= {"accuracy", "macro_f1", "loss", "per_class", "confusion_matrix"}
    assert sum(map(sum, metrics["confusion_matrix"])) == metrics["samples"]


def test_a_split_that_is_not_there_is_answered_with_those_that_are(finished_run: Path) -> None:
    with pytest.raises(UsageError, match="no dev split") as raised:
        finetune.evaluate(finished_run, split="dev", device="cpu")
    assert "validation" in raised.value.remedy


@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_folder_without_a_run_is_told_as_such(folder: str, tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        finetune.evaluate(tmp_path / folder, device="cpu")
    with pytest.raises(NotARun):
        finetune.predict(tmp_path / folder, TEXTS, device="cpu")


def test_an_unknown_device_is_answered_with_those_that_there_are(finished_run: Path) -> None:
    device: Any = "tpu"
    with pytest.raises(UsageError, match="tpu"):
        finetune.run(device=device)
    with pytest.raises(UsageError, match="tpu"):
        finetune.evaluate(finished_run, device=device)
    with pytest.raises(UsageError, match="tpu"):
        finetune.predict(finished_run, TEXTS, device=device)


def test_a_run_keeps_its_model_when_its_data_has_gone(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "model", tmp_path / "model")
    shutil.copy(finished_run / "config.yaml", tmp_path)
    assert len(finetune.predict(tmp_path, TEXTS, device="cpu")) == 3
