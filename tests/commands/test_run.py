import json
import re
from pathlib import Path
from typing import Any

import pytest
from hub_server import hub_client
from huggingface_hub import close_session
from tiny_runs import (
    Command,
    finetune_in_a_child,
    flags,
    have_same_bits,
    logged_metrics,
    run_tiny,
    unfinished_files,
    weights_of,
)

import finetune
from finetune.files import SCHEMA_VERSION, read_json

CLOSED = "http://127.0.0.1:9"


def test_run_prints_metrics_and_output_paths(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    outcome = command("run", "--model", tiny_folder, "--output-dir", tmp_path / "run", *flags())
    assert outcome.code == 0, outcome.errors
    results = read_json(tmp_path / "run" / "all_results.json")
    for shown in (
        "test split of questions, 270 rows",
        f"accuracy {100 * results['test_accuracy']:.1f}%",
        f"macro F1 {100 * results['test_macro_f1']:.1f}%",
        "on 270 test rows (95% CI ",
        f"Next: finetune predict {tmp_path / 'run'} FILE",
        f"report: {tmp_path / 'run' / 'report.html'}",
        *results["class_names"],
    ):
        assert shown in outcome.output
    for emitted in ("device: cpu", "64 train, 81 validation, 270 test rows", "step 8/8", "epoch 2"):
        assert emitted in outcome.errors
        assert emitted not in outcome.output


@pytest.mark.slow
def test_saved_config_reproduces_the_run_in_a_new_process(
    finished_run: Path, tmp_path: Path
) -> None:
    child = finetune_in_a_child(
        "run",
        *("--config", finished_run / "config.yaml", "--output-dir", tmp_path / "run", "--json"),
        environment={"NO_COLOR": ""},
    )
    assert child.returncode == 0, child.stderr
    assert have_same_bits(weights_of(tmp_path / "run"), weights_of(finished_run))
    assert logged_metrics(tmp_path / "run") == logged_metrics(finished_run)
    config = (tmp_path / "run" / "config.yaml").read_bytes()
    assert config == (finished_run / "config.yaml").read_bytes()
    assert unfinished_files(tmp_path) == []
    [line] = child.stdout.splitlines()
    saved = read_json(tmp_path / "run" / "all_results.json")
    assert json.loads(line) == saved | {"output_dir": str(tmp_path / "run")}
    assert "\x1b" not in child.stderr


def test_dry_run_predicts_the_results_and_writes_no_files(
    command: Command, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"train_layers": 1, "num_train_epochs": 1.5}
    dry_run = ("run", "--dry-run", "--model", tiny_folder, *flags(**options))
    command(*dry_run, "--output-dir", tiny_folder).assert_rejected(2, str(tiny_folder))
    outcome = command(*dry_run, "--json")
    assert outcome.code == 0, outcome.errors
    facts = json.loads(outcome.output)
    assert facts["schema_version"] == SCHEMA_VERSION
    assert facts["rows"] == {"train": 64, "validation": 81, "test": 270}
    assert sum(facts["training_rows_by_class"].values()) == 64
    assert facts["output_dir"] == "runs/questions-tiny-last-1"
    assert facts["linear_head_estimate"]["sampled"] == 64
    assert 0 < facts["estimated_seconds"] < 600
    assert sum(facts["batches_of_an_epoch_by_padded_length"].values()) == facts["steps_per_epoch"]
    table = command(*dry_run).output
    assert re.search(r"about .* s \(6 steps\)", table)
    assert "64 training rows, 6 classes: a linear head on the frozen encoder" in table
    assert list(tmp_path.iterdir()) == []
    results = run_tiny(tmp_path / "run", model=tiny_folder, **options)
    same = results.keys() & facts.keys() - {"schema_version", "output_dir"}
    assert same >= {"mode", "device", "trained_parameters", "real_token_share"}
    assert {name: facts[name] for name in same} == {name: results[name] for name in same}
    assert facts["total_steps"] / facts["steps_per_epoch"] == results["epoch"]


def test_default_run_without_a_network_suggests_the_bundled_questions(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for proxy in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(proxy, CLOSED)
    close_session()  # so that the next request uses the proxies
    with hub_client(endpoint=CLOSED, home=tmp_path / "home"):
        command("run").assert_rejected(6, "TREC is not in the cache", "--data questions")
    assert not (tmp_path / "runs").exists()


def test_run_accepts_a_config_with_overrides_and_returns_the_saved_results(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file, run = tmp_path / "mine.yaml", tmp_path / "run"
    file.write_text("data: {data: questions}\ntraining: {max_steps: 5, seed: 3}")
    paths: dict[str, Any] = {"model": tiny_folder, "output_dir": run}
    results = finetune.run(
        file, device="cpu", max_steps=1, assignments=["data.max_train_samples=16"], **paths
    )
    assert results.output_dir == str(run)
    assert json.loads(json.dumps(results.to_json())) == read_json(run / "all_results.json")
    assert (results.training.train_samples, results.training.epoch) == (16, 1.0)
    assert "seed: 3\n" in (run / "config.yaml").read_text()


def test_data_problems_are_reported_on_one_line_each(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    names = ["invoice"] * 40 + ["delivery"] * 39 + ["invocie"]
    rows = [f"{name} number {number},{name}" for number, name in enumerate(names)]
    table = tmp_path / "tickets.csv"
    table.write_text("\n".join(["text,label", *rows]))
    options = {"data": table, "max_steps": 1, "validation_fraction": 0}
    run = ("run", *flags(**options), "--model", tiny_folder, "--output-dir", tmp_path / "run")
    planned = command(*run, "--dry-run")
    assert planned.code == 0, planned.errors
    trained = command(*run, "--class-weights", "balanced")
    assert trained.code == 0, trained.errors
    found, printed = (
        [line for line in outcome.errors.splitlines() if line.startswith("warning: ")]
        for outcome in (planned, trained)
    )
    assert any("'invocie' (1 row) may be a misspelling of 'invoice'" in line for line in found)
    # A suggested option that is already set is not printed.
    assert printed == [line for line in found if "--class-weights balanced" not in line] != found
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "may be a misspelling" in page
