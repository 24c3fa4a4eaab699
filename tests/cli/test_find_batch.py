"""``finetune find-batch``: real searches of small models, as a user types them."""

import json
import signal
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import psutil
import pytest
from tiny_models import save_tiny_model
from tiny_runs import Command, Outcome, start_finetune

RESULT = {
    "device", "mode", "max_length", "precision", "stores_features", "budget_bytes", "max_verified",
    "first_failed", "predicted_maximum", "recommended", "fastest", "prefix_batch", "peak_bytes",
    "probes", "seconds",
}  # fmt: skip
PROBE = {"part", "batch", "outcome", "peak_bytes", "examples_per_second", "seconds", "reason"}
ESTIMATE = {
    "machine", "device", "mode", "max_length", "precision", "stores_features", "budget_bytes",
    "batch", "lowest_batch", "highest_batch", "prefix_batch", "peak_bytes", "basis",
}  # fmt: skip


@pytest.fixture
def find_batch(command: Command, tiny_folder: Path, tmp_path: Path) -> Command:
    """Return a function that types the command for a small model on the processor."""

    def find(*arguments: str | Path) -> Outcome:
        return command(
            "find-batch", "--model", tiny_folder, "--device", "cpu", "--cache-dir",
            tmp_path / "cache", "--output-dir", tmp_path / "found", *arguments,
        )  # fmt: skip

    return find


def test_a_table_a_picture_and_figures_tell_what_was_found_and_then_remembered(
    find_batch: Command, tmp_path: Path
) -> None:
    options = ("--train-layers", "1", "--no-feature-cache", "--max-length", "16", "--limit", "2")
    outcome = find_batch(*options)
    assert outcome.code == 0, outcome.errors
    header, line, *notes = [line for line in outcome.output.splitlines() if line]
    assert header.split() == [
        "device", "mode", "tokens", "largest", "fails", "GiB", "of", "fastest", "use", "probes", "s"
    ]  # fmt: skip
    assert line.startswith("cpu     last-1, core each update      16        2      -")
    assert notes == [f"figures and picture: {tmp_path / 'found'}"]
    assert "searching on cpu: last-1, 16 tokens" in outcome.errors
    assert "  batch 2: fits, 0." in outcome.errors

    kept = json.loads((tmp_path / "found" / "find-batch.json").read_text())
    picture = (tmp_path / "found" / "find-batch.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    [first] = kept["results"]

    again = find_batch(*options, "--json")
    assert again.code == 0, again.errors
    emitted = json.loads(again.output)
    assert emitted.keys() == {"schema_version", "results"}
    assert emitted["schema_version"] == 1
    [result] = emitted["results"]
    assert result.keys() == RESULT
    assert all(probe.keys() == PROBE for probe in result["probes"])
    assert [probe["batch"] for probe in result["probes"]] == [first["recommended"]]
    changing = {"probes", "seconds", "budget_bytes"}
    assert {name: result[name] for name in RESULT - changing} == {
        name: first[name] for name in RESULT - changing
    }
    assert result["max_verified"] == 2
    assert result["first_failed"] is None
    assert 0 < result["peak_bytes"] < result["budget_bytes"]
    assert json.loads((tmp_path / "found" / "find-batch.json").read_text()) == emitted


def test_a_frozen_core_has_a_size_of_its_own(find_batch: Command) -> None:
    outcome = find_batch("--freeze-core", "--max-length", "16", "--limit", "1", "--json")
    assert outcome.code == 0, outcome.errors
    [result] = json.loads(outcome.output)["results"]
    assert (result["mode"], result["stores_features"]) == ("head", True)
    assert (result["prefix_batch"], result["max_verified"]) == (1, 1)
    peaks = {probe["part"]: probe["peak_bytes"] for probe in result["probes"]}
    assert peaks.keys() == {"prefix", "suffix"}
    assert result["peak_bytes"] == max(peaks.values())


def test_nothing_that_fits_is_exit_code_5(find_batch: Command, tmp_path: Path) -> None:
    outcome = find_batch("--max-length", "16", "--limit", "1", "--memory-limit", "1MiB",
                         "--freeze-core", "--no-feature-cache")  # fmt: skip
    outcome.assert_refused(5, "not even a batch of one row", "--max-length", "--memory-limit")
    assert "batch 1: too big" in outcome.errors
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize("size", ["much", "0", "-1GiB", ""])
def test_a_limit_that_is_no_size_is_refused_before_any_search(
    size: str, find_batch: Command
) -> None:
    outcome = find_batch("--limit", "1", "--memory-limit", size)
    outcome.assert_refused(2, "--memory-limit", repr(size), "4GiB")
    assert "searching" not in outcome.errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--for", "m1-9gb"), ("m1-9gb", "m1-8gb, m1-16gb")),
        (("--for", "pentium"), ("pentium", "m4-max")),
        (("--for", ""), ("m1-8gb",)),
        (("--memory", "much"), ("--memory", "'much'")),
        (("--memory", "5"), ("--memory", "'5'", "less than any Mac has")),
        (("--memory", ""), ("--memory", "''")),
        (("--for", "m1-8gb", "--memory", "8GiB"), ("--for", "--memory")),
        (("--limit", "0"), ("--limit",)),
        (("--time-limit", "0"), ("time_limit",)),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: tuple[str, ...], words: tuple[str, ...], find_batch: Command
) -> None:
    find_batch(*arguments).assert_refused(2, *words)


@pytest.mark.slow
def test_a_folder_that_can_not_be_written_to_is_told(find_batch: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = find_batch(
        "--train-layers", "1", "--no-feature-cache", "--max-length", "16", "--limit", "1",
        "--output-dir", tmp_path / "file",
    )  # fmt: skip
    outcome.assert_refused(2, str(tmp_path / "file"), "--output-dir")


def test_estimates_are_called_so_and_say_what_they_rest_on(
    command: Command, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("find-batch", "--model", tiny_folder, "--memory", "16GiB", "--max-length", "16",
                 "--freeze-core", "--limit", "7")  # fmt: skip
    outcome = command(*arguments)
    assert outcome.code == 0, outcome.errors
    assert "These are estimates: nothing was run on such a machine. They rest on" in outcome.output
    assert "times" in outcome.output
    assert "Mac with 16GiB" in outcome.output
    assert "head, core each update" in outcome.output

    emitted = json.loads(command(*arguments, "--json").output)
    assert emitted.keys() == {"schema_version", "estimates"}
    assert [one["stores_features"] for one in emitted["estimates"]] == [True, False]
    for one in emitted["estimates"]:
        assert one.keys() == ESTIMATE
        assert one["lowest_batch"] <= one["batch"] <= one["highest_batch"] <= 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_the_command(number: signal.Signals, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    process = start_finetune(
        "find-batch", "--model", model, "--device", "cpu", "--max-length", "64", "--fresh",
        "--output-dir", tmp_path / "found",
    )  # fmt: skip
    while not (children := psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    assert ("error: stopped" in errors) == (number is signal.SIGINT)
    assert psutil.wait_procs(children, timeout=3)[1] == []
