"""One byte of a file changes, or its end is lost: the next command names it, or nothing changes.

``ALL_FAULTS=1`` in the environment tries thousands of variants instead of a sample, and a fraction
such as ``ALL_FAULTS=0.1`` changes fewer bytes. ``FAULT_LOG`` names a file to which the outcomes are
appended.
"""

import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tiny_models import save_tiny_model
from tiny_runs import TEXTS, Command, Outcome, at, flags, press_ctrl_c, run_tiny

from finetune.config.schema import DataConfig
from finetune.errors import FinetuneError, InterruptionError
from finetune.events import Event, Step, WarningMessage, sent_to
from finetune.files import WRITTEN_BY, read_cache_json, write_cache_json
from finetune.web import server
from finetune.web.journal import Action, LabelJournal, read_label_source

ALL = float(os.environ.get("ALL_FAULTS", 0))
SAMPLE = 2
only_with_all = pytest.mark.skipif(not ALL, reason="takes minutes: set ALL_FAULTS=1")
TABLE = "".join(f"{text}\n" for text in ["text", *TEXTS, "Who was Ada Lovelace?"])
Act = Callable[[], Outcome]


def damaged(content: bytes, *, places: int) -> list[tuple[str, bytes]]:
    """Return variants of a file: cut off, and with one other byte in some places."""
    variants = [("empty", b""), ("half", content[: len(content) // 2]), ("cut", content[:-1])]
    chance = random.Random(len(content))
    places = min(round(places * (ALL or 1)), len(content))
    for place in sorted(chance.sample(range(len(content)), places)):
        old, others = content[place], [content[place] ^ 1 << chance.randrange(8)]
        if chr(old).isdecimal():  # still a number
            others.append(48 + (old - 47 + chance.randrange(9)) % 10)
        elif chr(old).isalpha() or old == 32:  # still a name, or another space
            others.append(9 if old == 32 else old ^ 32)
        for new in others:
            changed = content[:place] + bytes([new]) + content[place + 1 :]
            variants.append((f"byte {place} {bytes([old])!r} to {bytes([new])!r}", changed))
    return variants if ALL else chance.sample(variants, SAMPLE)


@dataclass
class Scene:
    """A folder with complete files, and for each of them the commands that read it.

    The result of a command is what it prints, and the ``outputs`` that it writes.
    """

    root: Path
    reads: Mapping[str, Sequence[Act]]
    outputs: Sequence[str] = ()
    compares_text: bool = True  # training prints seconds
    places: int = 100
    judged: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def try_all(self, name: str) -> None:
        """Damage each file in each way, run the commands that read it, and judge them."""
        self._backup = shutil.copytree(self.root, self.root.with_name("backup"))
        expected: dict[Act, Any] = {}
        for path, acts in self.reads.items():
            file = self.root / path
            for act in [act for act in acts if act not in expected]:
                outcome = act()
                assert outcome.code == 0, outcome.errors
                expected[act] = self._result(outcome)
                self._restore()
            for variant, content in damaged(file.read_bytes(), places=self.places):
                for act in acts:
                    file.write_bytes(content)
                    outcome = act()
                    verdict = judge(outcome, file, is_same=self._result(outcome) == expected[act])
                    self.judged[f"{path}: {verdict}"] += 1
                    if verdict.isupper():
                        what = f"{path}, {variant}: {outcome.output[-300:]} {outcome.errors[-300:]}"
                        self.faults.append(f"{verdict}: {what!r}")
                    self._restore()
        if log := os.environ.get("FAULT_LOG"):
            with open(log, "a") as file:
                for line, count in sorted(self.judged.items()):
                    file.write(f"{name}: {line} {count}\n")
                for fault in self.faults:
                    file.write(f"  {name}: {fault}\n")
        assert not self.faults, f"{len(self.faults)} of {self.judged.total()}: {self.faults[:20]}"

    def _result(self, outcome: Outcome) -> Any:
        written = [self.root / name for name in self.outputs]
        return outcome.output * self.compares_text, [
            file.exists() and file.read_bytes() for file in written
        ]

    def _restore(self) -> None:
        for path in sorted(self.root.rglob("*"), reverse=True):
            if not (self._backup / path.relative_to(self.root)).exists():
                path.unlink() if path.is_file() else path.rmdir()
        for kept in self._backup.rglob("*"):
            path = self.root / kept.relative_to(self._backup)
            if kept.is_dir():
                path.mkdir(exist_ok=True)
            elif not path.exists() or path.read_bytes() != kept.read_bytes():
                shutil.copy2(kept, path)


def judge(outcome: Outcome, file: Path, *, is_same: bool) -> str:
    lines = outcome.errors.splitlines()
    if "Traceback" in outcome.errors or "unexpected" in outcome.errors:
        return "CRASH"
    errors = [line for line in lines if line.startswith(("error: ", "  try: "))]
    if outcome.code:
        return "reported" if len(errors) == 2 and file.name in " ".join(errors) else "MISREPORTED"
    warnings = [line for line in lines if file.name in line]
    return "unchanged" if is_same else "warned" if warnings else "WRONG"


@pytest.fixture
def act(command: Command) -> Callable[..., Act]:
    """Return a function that makes a call of the command."""
    return lambda *arguments: partial(command, *arguments)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs in a folder."""
    root = tmp_path_factory.mktemp("flips") / "finished"
    model = save_tiny_model(root / "tiny")
    (root / "texts.csv").write_text(TABLE)
    for name, seed in (("a", 1), ("b", 2)):
        run_tiny(root / "runs" / name, model=model, seed=seed, learning_rate=1e-2)
    return root


def test_damaged_finished_run_is_reported_or_gives_equal_output(
    finished: Path, tmp_path: Path, act: Callable[..., Act], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(finished, tmp_path / "work")
    monkeypatch.chdir(root)
    predict = act("predict", "runs/a", *TEXTS, "--json")
    precise = act("predict", "runs/a", *TEXTS, "--json", "--target-precision", "0.3")
    table = act("predict", "runs/a", "texts.csv", "--json")
    evaluate = act("evaluate", "runs/a", "--json")
    page = act("report", "runs/a")
    compare = act("compare", "runs/a", "runs/b", "--json")
    runs = act("runs", "--json")
    resume = act("run", "--resume-from-checkpoint", "runs/a", "--json")
    push = act("push", "runs/a", "ada/a", "--dry-run", "--json")
    monkeypatch.setattr(server, "run_server", answer_one_request)
    serve = act("serve", "runs/a", "--port", "0", "--json")
    reads: dict[str, list[Act]] = {
        "config.yaml": [predict, page, compare, runs],
        "manifest.json": [table, evaluate, page, resume],
        "environment.json": [page],
        "metrics.jsonl": [page],
        "warnings.jsonl": [page],
        "predictions.jsonl": [page, compare],
        "all_results.json": [page, compare, runs, resume, serve],
        "SHA256SUMS": [page],
        "model/config.json": [predict, page, serve],
        "model/inference.json": [predict, page, serve],
        "model/tokenizer.json": [predict],
        "model/tokenizer_config.json": [predict],
        "model/model.safetensors": [predict, push],
        "model/confidences.json": [precise],
        "model/SHA256SUMS": [predict],
    }
    outputs = ["runs/a/report.html", "runs/a/model/README.md"]
    Scene(root, {f"runs/a/{name}": reads[name] for name in reads}, outputs).try_all("finished")


def answer_one_request(app: Any, listener: Any, on_stop: Any) -> None:
    sys.stdout.write(
        TestClient(app, base_url="http://127.0.0.1").post("/", json={"inputs": TEXTS}).text
    )


@pytest.mark.slow
@only_with_all
def test_damaged_stopped_run_is_reported_or_resumes_to_equal_weights(
    tiny_folder: Path, tmp_path: Path, act: Callable[..., Act], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "work"
    with suppress(InterruptionError):
        emit = at(Step, 3, press_ctrl_c)
        run_tiny(root / "run", model=tiny_folder, max_train_samples=32, emit=emit)
    [last, *_] = sorted((root / "run" / "checkpoints").iterdir(), reverse=True)
    names = [*(file.name for file in last.iterdir())]
    resume = act("run", "--resume-from-checkpoint", "work/run", "-q")
    reads = {f"run/checkpoints/{last.name}/{name}": [resume] for name in names}
    others = ("config.yaml", "manifest.json", "environment.json", "metrics.jsonl", "SHA256SUMS")
    reads |= {f"run/{name}": [resume] for name in others}
    outputs = ("run/model/model.safetensors", "run/predictions.jsonl", "run/model/inference.json")
    Scene(root, reads, outputs, compares_text=False, places=8).try_all("stopped")


@pytest.mark.slow
@only_with_all
def test_damaged_features_are_recomputed(
    tiny_folder: Path, tmp_path: Path, act: Callable[..., Act], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = flags(model=tiny_folder, train_layers=1, cache_dir="work", output_dir="work/run")
    run = act("run", *options, "-q")
    assert run().code == 0
    files = [*Path("work/features").iterdir()]
    shutil.rmtree("work/run")
    reads = {str(file.relative_to("work")): [run] for file in files}
    outputs = ("run/model/model.safetensors", "run/predictions.jsonl")
    Scene(tmp_path / "work", reads, outputs, compares_text=False, places=8).try_all("features")


def test_damaged_labels_are_reported_or_unchanged(
    tmp_path: Path, act: Callable[..., Act], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "work"
    root.mkdir()
    (root / "texts.csv").write_text(TABLE)

    def label(*actions: Action) -> Outcome:
        errors: list[str] = []

        def receive(event: Event) -> None:
            errors.append(
                f"warning: {event.message}" if isinstance(event, WarningMessage) else str(event)
            )

        with sent_to(receive):
            try:
                source = read_label_source(root / "texts.csv", DataConfig(), is_multi_label=False)
                journal = LabelJournal(root / "texts.csv", source)
                for action in actions:
                    journal.record(action)
                journal.close()
            except FinetuneError as error:
                return Outcome(
                    error.exit_code, "", f"error: {error.message}\n  try: {error.remedy}"
                )
        return Outcome(0, f"{journal.labels} {journal.order}", "\n".join(errors))

    names = ("people", "rivers", "people", "space")
    label(*(Action("label", row, (name,), "random") for row, name in enumerate(names)))
    label(
        Action("undo"), Action("rename", classes=("rivers",), new_name="water"), Action("skip", 3)
    )
    Scene(root, {"texts.labels.jsonl": [label]}, ["texts.labels.csv"]).try_all("labels")


@pytest.mark.slow
@only_with_all
def test_damaged_seeds_and_folds_are_reported_or_give_equal_output(
    tiny_folder: Path, tmp_path: Path, act: Callable[..., Act], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "work"
    for kind in ("seeds", "folds"):
        run_tiny(
            root / kind, model=tiny_folder, num_train_epochs=1, max_train_samples=32, **{kind: 2}
        )
    commands = {
        kind: [act("compare", "work", "--json"), act("runs", "work", "--json")]
        for kind in ("seeds", "folds")
    }
    commands["seeds"].append(act("predict", "work/seeds", *TEXTS, "--json"))
    resume = act("run", "--folds", "2", "--resume-from-checkpoint", "work/folds", "--json")
    reads = {f"{kind}/{kind}.json": acts for kind, acts in commands.items()}
    reads |= {"folds/predictions.jsonl": commands["folds"], "folds/manifest.json": [resume]}
    Scene(root, reads, places=40).try_all("several")


@pytest.mark.slow
@only_with_all
def test_damaged_exports_are_reported_or_give_equal_predictions(
    finished: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(finished, tmp_path / "work")
    monkeypatch.chdir(root)
    assert command("export", "onnx", "runs/a", "--verify").code == 0
    assert command("export", "bundle", "runs/a").code == 0

    predict = partial(command, "predict", "runs/a", *TEXTS, "--json", "--runtime", "onnx")
    onnx = ("model.onnx", "verified.json", "tokenizer.json", "config.json", "SHA256SUMS")
    reads = {f"runs/a/onnx/{name}": [predict] for name in onnx}
    bundle = ("model.onnx", "model.onnx.data", "inference.json", "tokenizer.json", "SHA256SUMS")
    predict = partial(command, "predict", "runs/a/bundle", *TEXTS, "--json")
    reads |= {f"runs/a/bundle/{name}": [predict] for name in bundle}
    Scene(root, reads, places=30).try_all("exports")


def test_damaged_measurements_are_not_used(tmp_path: Path) -> None:
    (root := tmp_path / "work").mkdir()
    write_cache_json(root / "a.json", {"largest": 32, "speed": 81.5, **WRITTEN_BY})

    def read() -> Outcome:
        with suppress(OSError, ValueError):
            return Outcome(0, str(read_cache_json(root / "a.json")), "")
        return Outcome(0, "", "a.json is measured again")

    Scene(root, {"a.json": [read]}).try_all("caches")
