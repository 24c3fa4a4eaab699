"""Uploads of a model to a local Hub server."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import MAIN_COMMIT, HubServer, hub_client
from tiny_runs import TEXTS, Command
from transformers import pipeline

import finetune

NAME = "ada/questions"
TOKEN = "hf_" + "s3cret" * 6


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with (
        HubServer(uploads=tmp_path / "hub") as server,
        hub_client(endpoint=server.endpoint, home=tmp_path / "home"),
    ):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def private_run(finished_run: Path, tmp_path: Path) -> Path:
    """A run with ``private_data``."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("private_data: false", "private_data: true"))
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def expected_files(run: Path) -> dict[str, bytes]:
    return contents(run / "model") | {"report.html": (run / "report.html").read_bytes()}


def test_pushed_run_is_identical_and_private(
    hub: HubServer, finished_run: Path, command: Command
) -> None:
    planned = command("push", finished_run, NAME, "--dry-run", "--json")
    assert hub.requests == []
    done = command("push", finished_run, NAME, "--json", "--debug")
    assert done.code == 0, done.errors
    found = json.loads(done.output)
    assert found["url"] == f"{hub.endpoint}/{NAME}"
    assert (found["commit"], found["public"]) == (MAIN_COMMIT, False)
    assert json.loads(planned.output) == found | {"commit": None}
    uploaded = contents(hub.folders["models"][NAME])
    assert uploaded == expected_files(finished_run)
    assert str(finished_run.parent).encode() not in uploaded["report.html"]
    assert hub.private == {NAME}
    assert hub.messages == [f"Upload finished (finetune {finetune.__version__})"]
    assert TOKEN not in done.output + done.errors

    again = command("push", finished_run, NAME, "--public", "--revision", "v2")
    assert f"{hub.endpoint}/{NAME}/tree/v2, private" in again.output
    assert contents(hub.folders["models"][f"{NAME}@v2"]) == expected_files(finished_run)

    classify = pipeline("text-classification", model=NAME)
    answers = finetune.predict(finished_run, TEXTS, device="cpu")
    assert [one["label"] for one in classify(TEXTS)] == [one.label for one in answers]


def test_push_to_a_public_repository_requires_public(
    hub: HubServer, finished_run: Path, command: Command
) -> None:
    assert command("push", finished_run, NAME, "--public").code == 0
    assert hub.private == set()
    command("push", finished_run, NAME).assert_rejected(2, "public", "--public")
    assert len(hub.messages) == 1


def test_private_texts_are_not_uploaded_unless_allowed(
    hub: HubServer, private_run: Path, command: Command
) -> None:
    command("push", private_run, NAME).assert_rejected(2, "private", "--without-report")
    command("push", private_run, NAME, "--dry-run").assert_rejected(2, "--allow-private-data")
    assert hub.requests == []
    assert command("push", private_run, NAME, "--without-report").code == 0
    pushed = hub.folders["models"][NAME]
    assert contents(pushed) == contents(private_run / "model")
    texts = [row["text"] for row in map(json.loads, (private_run / "predictions.jsonl").open())]
    assert not any(
        text.encode() in content for text in texts for content in contents(pushed).values()
    )
    assert command("push", private_run, NAME, "--allow-private-data").code == 0
    assert "report.html" in contents(pushed)


def test_damaged_weights_are_not_uploaded(
    hub: HubServer, finished_run: Path, tmp_path: Path, command: Command
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    weights = run / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for options in ([], ["--dry-run"]):
        command("push", run, NAME, *options).assert_rejected(2, "model.safetensors", "SHA256SUMS")
    assert hub.requests == []


def test_push_errors_state_the_cause_without_the_token(
    hub: HubServer,
    private_run: Path,
    finished_run: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push = ("push", finished_run, NAME)
    command("push", finished_run, "questions").assert_rejected(2, "OWNER/NAME")
    (private_run / "all_results.json").unlink()
    command("push", private_run, NAME).assert_rejected(2, "has not finished")
    hub.failures.read_only.add(NAME)
    rejected = command(*push, "--debug")
    assert rejected.code == 2
    assert all(word in rejected.errors for word in (NAME, "You don't have the rights", "OWNER"))
    assert "s3cret" not in rejected.errors
    hub.failures.down = True
    command(*push).assert_rejected(6, NAME)
    hub.failures.down = False
    monkeypatch.delenv("HF_TOKEN")
    command(*push).assert_rejected(2, "hf auth login", "HF_TOKEN")
    assert hub.messages == []
