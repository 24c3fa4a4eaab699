"""``finetune find-batch``: one real search, the others on simulated machines."""

import json
import signal
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from batch_finder.simulated_machines import SimulatedMachine, SimulatedProber, prober
from batch_finder.test_results import ESTIMATE, RESULT
from held import FINETUNE, Hold, Start
from tiny_runs import Command, Outcome

from finetune.batch_finder.results import FoundBatches
from finetune.commands.find_batch import show_batches

__all__ = ["prober"]


@pytest.fixture
def find_batch(command: Command, tiny_folder: Path, tmp_path: Path) -> Command:
    """Return a function that types the command for a small model on the CPU."""

    def find(*arguments: str | Path) -> Outcome:
        return command(
            "find-batch", "--model", tiny_folder, "--device", "cpu", "--cache-dir",
            tmp_path / "cache", "--output-dir", tmp_path / "found", *arguments,
        )  # fmt: skip

    return find


@pytest.mark.slow
def test_a_real_search_shows_a_table_and_keeps_a_picture_and_its_results(
    find_batch: Command, tmp_path: Path
) -> None:
    outcome = find_batch(
        "--train-layers", "1", "--no-feature-cache", "--max-length", "16", "--limit", "2"
    )
    assert outcome.code == 0, outcome.errors
    header, line, *notes = [line for line in outcome.output.splitlines() if line]
    assert header.split() == [
        "device", "mode", "tokens", "largest", "fails", "GiB", "of", "fastest", "use", "probes", "s"
    ]  # fmt: skip
    assert line.startswith("cpu     last-1, no stored features      16        2      -")
    assert notes == [f"results and picture: {tmp_path / 'found'}"]
    assert "searching on cpu: last-1, 16 tokens" in outcome.errors
    assert "  batch 2: fits, 0." in outcome.errors
    picture = (tmp_path / "found" / "find-batch.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    [result] = json.loads((tmp_path / "found" / "find-batch.json").read_text())["results"]
    assert 0 < result["peak_bytes"] < result["budget_bytes"]
    assert len(list((tmp_path / "cache" / "batches").iterdir())) == 1


def test_json_is_what_is_kept_in_the_folder(
    prober: SimulatedProber, find_batch: Command, tmp_path: Path
) -> None:
    options = ("--max-length", "16", "--limit", "9", "--json")
    outcome = find_batch(*options)
    assert outcome.code == 0, outcome.errors
    printed = json.loads(outcome.output)
    assert json.loads((tmp_path / "found" / "find-batch.json").read_text()) == printed
    full, head = printed["results"]
    assert {probe["part"] for probe in full["probes"]} == {"whole"}
    assert {probe["part"] for probe in head["probes"]} == {"prefix", "suffix"}
    again, _ = json.loads(find_batch(*options).output)["results"]
    fresh, _ = json.loads(find_batch(*options, "--fresh").output)["results"]
    assert len(again["probes"]) == 1 < len(fresh["probes"]) == len(full["probes"])


def test_nothing_that_fits_is_exit_code_5(
    prober: SimulatedProber, find_batch: Command, tmp_path: Path
) -> None:
    prober.machine = SimulatedMachine(capacity_share=0.001)
    outcome = find_batch("--max-length", "16", "--limit", "1")
    outcome.assert_refused(5, "not even a batch of one example", "--max-length", "--memory-limit")
    assert "batch 1: too big" in outcome.errors
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--for", "m1-9gb"), ("m1-9gb", "m1-8gb, m1-16gb")),
        (("--for", "pentium"), ("pentium", "m4-max")),
        (("--for", ""), ("m1-8gb",)),
        (("--memory", "much"), ("--memory", "'much'")),
        (("--memory", "5MB"), ("--memory", "'5MB'", "less than any Mac has")),
        (("--memory", ""), ("--memory", "''")),
        (("--for", "m1-8gb", "--memory", "8GiB"), ("--for", "--memory")),
        (("--limit", "0"), ("--limit",)),
        (("--time-limit", "0"), ("time_limit",)),
        (("--limit", "1", "--memory-limit", "much"), ("--memory-limit", "'much'", "4GiB")),
        (("--limit", "1", "--memory-limit", "-1GiB"), ("--memory-limit", "'-1GiB'")),
        (("--limit", "1", "--memory-limit", ""), ("--memory-limit", "''")),
        (("--output-dir", __file__), (__file__, "--output-dir")),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_search(
    arguments: tuple[str, ...], words: tuple[str, ...], find_batch: Command
) -> None:
    outcome = find_batch(*arguments)
    outcome.assert_refused(2, *words)
    assert "searching" not in outcome.errors


def test_estimates_are_called_so_and_keep_no_files(
    command: Command, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = command(
        "find-batch", "--model", tiny_folder, "--memory", "16GiB", "--max-length", "16",
        "--freeze-core", "--no-feature-cache", "--limit", "7",
    )  # fmt: skip
    assert outcome.code == 0, outcome.errors
    assert "These are estimates: nothing was run on such a machine." in outcome.output
    assert "Mac with 16GiB  head, no stored features      16      7     7   7" in outcome.output
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_a_search_says_what_is_not_known_and_what_follows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = (
        RESULT,
        replace(RESULT, mode="full", stores_features=False, features_batch=None, first_failed=None,
                predicted_maximum=2000, peak_bytes=None, max_verified=1234),
    )  # fmt: skip
    show_batches(FoundBatches(results=results), folder="runs/found")
    _, head, full, *notes = [line for line in capsys.readouterr().out.splitlines() if line]
    assert head.split() == ["cpu", "head", "48", "8", "9", "0.00", "0.00", "7", "6", "2", "2"]
    assert full.split() == ["cpu", "full", "48", "1,234", "-", "-", "0.00", "7", "6", "2", "2"]
    assert notes == [
        "head at 48 tokens: features are extracted with --eval-batch-size 5",
        "full at 48 tokens: the time limit ended the search; memory is predicted to hold 2,000 "
        "examples",
        "results and picture: runs/found",
    ]


def test_estimates_say_once_what_each_is_based_on(capsys: pytest.CaptureFixture[str]) -> None:
    estimates = (
        ESTIMATE,
        replace(ESTIMATE, padded_length=128),
        replace(ESTIMATE, mode="head", stores_features=True, features_batch=1500, basis="a guess"),
        replace(ESTIMATE, mode="last-2", basis="a guess", features_batch=0),
    )
    show_batches(FoundBatches(estimates=estimates), folder="")
    header, *lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert header.split() == ["machine", "mode", "tokens", "batch", "from", "to", "GiB", "of"]
    assert lines[0].split() == ["m1-8gb", "full", "512", "3", "2", "4", "0.00", "0.00"]
    assert lines[4:] == [
        "These are estimates: nothing was run on such a machine. They are based on",
        "full: measurements",
        "head, last-2, no stored features: a guess",
        "head at 512 tokens: features are extracted with --eval-batch-size 1,500",
    ]


@pytest.mark.slow
def test_a_real_search_finds_sizes_of_both_parts(find_batch: Command) -> None:
    outcome = find_batch("--freeze-core", "--max-length", "16", "--limit", "1", "--json")
    assert outcome.code == 0, outcome.errors
    [result] = json.loads(outcome.output)["results"]
    assert (result["mode"], result["stores_features"]) == ("head", True)
    assert (result["prefix_batch"], result["max_verified"]) == (1, 1)
    peaks = {probe["part"]: probe["peak_bytes"] for probe in result["probes"]}
    assert result["peak_bytes"] == max(peaks.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_the_command(
    number: signal.Signals, start: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    hold = Hold(tmp_path, "finetune.batch_finder.trial:Trial.take_step")
    process = start(
        *FINETUNE, "find-batch", "--model", tiny_folder, "--device", "cpu", "--max-length", "64",
        "--fresh", "--output-dir", tmp_path / "found",
        environment=hold.environment(),
    )  # fmt: skip
    hold.wait(process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert children
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    assert ("error: stopped" in errors) == (number is signal.SIGINT)
    assert psutil.wait_procs(children, timeout=60)[1] == []
