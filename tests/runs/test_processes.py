"""Runs with two processes give the same results as runs with one process."""

import json
import multiprocessing
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from process_worker import Work, work
from tiny_runs import QUICK, at, run_tiny, weights_of

import finetune
from finetune.events import Step
from finetune.files import read_json, read_jsonl

# All runs are trained by one launch of two processes, which takes 16 s.
pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "last-2": {"train_layers": 2},
    "head": {"freeze_core": True},
    "lora": {"lora_rank": 4},
}
# The last step of an epoch has 3 examples, or 1.
ROWS = {"full": 49, "last-2": 51, "head": 51, "lora": 51}


def losses_of(run: Path) -> list[float]:
    """Return the losses of all steps and validations."""
    rows = read_jsonl(run / "metrics.jsonl")
    return [row.get("loss", row.get("eval_loss")) for row in rows]


def assert_same(run: Path, other: Path) -> None:
    """Compare the logs and the parameters of two runs."""
    assert losses_of(run) == pytest.approx(losses_of(other), abs=TOLERANCE)
    weights, expected = weights_of(run), weights_of(other)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=TOLERANCE, rtol=0)
    results, expected_results = (read_json(one / "all_results.json") for one in (run, other))
    for name in ("test_samples", "test_accuracy", "eval_accuracy", "best_global_step"):
        assert results.get(name) == expected_results.get(name)
    answers, expected_answers = (read_jsonl(one / "predictions.jsonl") for one in (run, other))
    assert [one["text"] for one in answers] == [one["text"] for one in expected_answers]


class Runs:
    """Runs with one process, and the same runs with two processes, in one launch."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        for mode in MODES:
            run_tiny(self.alone(mode), model=self.model, **self._options(mode))
        self._stop_alone()
        works = [Work(self._of_two(mode)) for mode in MODES]
        works.append(Work(self._of_two("full", "short of memory"), short_of_memory_at=3))
        works.append(Work(self._of_two("full", "stopped"), stopped_at=3))
        works.append(Work({"resume_from_checkpoint": str(self.together("resumed"))}))
        self.found = folder / "found.json"
        self.launched = launch(works, self.alone("full"), self.found)

    def alone(self, name: str) -> Path:
        return self.folder / "alone" / name

    def together(self, name: str) -> Path:
        return self.folder / "together" / name

    def _options(self, mode: str) -> dict[str, Any]:
        cache = {"cache_dir": str(self.folder / "cache")}
        return {**MODES[mode], **cache, "max_train_samples": ROWS[mode]}

    def _of_two(self, mode: str, name: str | None = None) -> dict[str, Any]:
        place = {"model": str(self.model), "output_dir": str(self.together(name or mode))}
        return {**QUICK, **self._options(mode), **place}

    def _stop_alone(self) -> None:
        """Interrupt a run with one process, which leaves the checkpoint of an epoch."""
        folder = self.together("resumed")
        with pytest.raises(ZeroDivisionError):
            run_tiny(
                folder, model=self.model, emit=at(Step, 6, lambda: 1 / 0), save_strategy="epoch",
                **self._options("full"),
            )  # fmt: skip


# Old PyTorch and tokenizers versions print these lines.
LIBRARIES = re.compile(r"^(\[Gloo\]|The OrderedVocab ).*\n", re.MULTILINE)


def launch(works: list[Work], used: Path, found: Path) -> list[tuple[int | None, str]]:
    """Run in two processes with torchrun variables, and return the exit codes and output."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    outputs = [found.with_name(f"output-{rank}.txt") for rank in range(2)]
    processes = [
        multiprocessing.get_context("spawn").Process(
            target=work,
            args=(works, used, found),
            kwargs={
                "environment": group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                "output": output,
            },
        )
        for rank, output in enumerate(outputs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    return [
        (process.exitcode, LIBRARIES.sub("", output.read_text()))
        for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_without_dropout: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("processes"), model_without_dropout)


def test_two_processes_write_one_run_folder_without_extra_output(runs: Runs) -> None:
    assert runs.launched == [(0, ""), (0, "")]
    assert not list(runs.folder.rglob("*.partial"))
    folders = {folder.name for folder in (runs.folder / "together").iterdir()}
    assert folders == {*MODES, "resumed", "short of memory", "stopped"}


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_weights_of_two_processes_match_one_process(mode: str, runs: Runs) -> None:
    assert_same(runs.together(mode), runs.alone(mode))


def test_both_processes_repeat_a_step_if_one_runs_out_of_memory(runs: Runs) -> None:
    assert_same(runs.together("short of memory"), runs.alone("full"))
    results = read_json(runs.together("short of memory") / "all_results.json")
    assert results["train_batch_size"] == QUICK["batch_size"] // 2 // 2


def test_two_processes_resume_a_run_of_one_process(runs: Runs) -> None:
    assert_same(runs.together("resumed"), runs.alone("full"))


def test_two_processes_evaluate_and_predict_like_one_process(runs: Runs) -> None:
    evaluation, results = json.loads(runs.found.read_text())

    expected = finetune.evaluate(runs.alone("full"), device="cpu").to_json()
    assert evaluation["accuracy"] == expected["accuracy"]
    assert evaluation["samples"] == expected["samples"]
    texts = ["Who was he?", "How far?", "Why?"]
    answers = finetune.predict(runs.alone("full"), texts, device="cpu")
    for result, answer in zip(results, answers, strict=True):
        assert result["label"] == answer.result["label"]
        assert result["probability"] == pytest.approx(answer.result["probability"], abs=TOLERANCE)


def test_one_process_resumes_a_run_of_two_stopped_by_a_signal(runs: Runs, tmp_path: Path) -> None:
    stopped = shutil.copytree(runs.together("stopped"), tmp_path / "stopped")
    assert [one.name for one in (stopped / "checkpoints").glob("step-*")] == ["step-3"]

    finetune.run(resume_from_checkpoint=stopped)

    assert_same(stopped, runs.alone("full"))


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_losses_of_two_gpus_match_one_gpu(tmp_path: Path, model_without_dropout: Path) -> None:
    works = []
    for mode in ("full", "head"):
        options = {**MODES[mode], "max_train_samples": ROWS[mode], "device": "cuda"}
        options |= {"cache_dir": str(tmp_path / "cache")}
        run_tiny(tmp_path / "alone" / mode, model=model_without_dropout, **options)
        place = {"model": str(model_without_dropout), "output_dir": str(tmp_path / "two" / mode)}
        works.append(Work({**QUICK, **options, **place}))

    used, found = tmp_path / "alone" / "full", tmp_path / "found.json"
    launched = launch(works, used, found)

    assert launched == [(0, ""), (0, "")]
    for mode in ("full", "head"):
        losses, expected = (losses_of(tmp_path / one / mode) for one in ("two", "alone"))
        assert losses == pytest.approx(expected, abs=TOLERANCE)
