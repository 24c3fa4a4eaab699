"""Whatever a command deletes or replaces, somebody else's files stay as they are."""

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from finetune.commands.resuming import Work, choose_work
from finetune.config.load import load_config
from finetune.errors import FinetuneError
from finetune.evaluation.prediction_file import check_output, prediction_file
from finetune.events import ignore
from finetune.files import temporary_path, write_text_atomically
from finetune.model.tensor_store import TensorStore
from finetune.ownership import OwnFolder, check_output_file
from finetune.runs.checkpoint import MANIFEST_NAME, names_of_checkpoint
from finetune.runs.folder import RunFolder, SeedsFolder
from finetune.tasks.base import Prediction

TREES = int(os.environ.get("FINETUNE_TREES", "0"))
# Names that a run has, that it had once, or that look as if it had them.
NAMES = [
    *("notes.txt", ".lock", "config.yaml", "config.yaml.partial", "metrics.jsonl", "report.html"),
    *("all_results.json", "seeds.json", "bench.json", "model.onnx", "x.csv", "x.csv.partial"),
    *("model/config.json", "model/vocab.txt", "model/notes.txt", "model.partial/config.json"),
    *("checkpoints/epoch=9.ckpt", "checkpoints/step-2/notes.txt", "checkpoints/step-9/state.json"),
    *("checkpoints/step-2.partial/state.json", "checkpoints/best-2/model.safetensors"),
    *("previous/config.yaml", "previous/model/config.json", "onnx/notes.txt", "onnx/model.onnx"),
    *("seed-42/notes.txt", "seed-42/config.yaml", "seed-43/model/notes.txt", "seed-7/config.yaml"),
    *("features/notes.json", "features/x.partial/notes.json", f"features/{64 * 'a'}.safetensors"),
    *("tensorboard/events.out.tfevents.1", "model/.finetune.jsonl", "runs/a/config.yaml"),
]


class Killed(BaseException):
    pass


class Machine:
    """Does to a folder what the commands do, without training, and is killed at any moment."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance, self.folder = random.Random(seed), folder

    def write(self, path: Path) -> None:
        if self.chance.random() < 0.02:
            temporary_path(path).write_text("half")
            raise Killed
        is_config = path.name == "config.yaml"
        text = "data: {data: questions}\nmodel: {model: tiny}\n" if is_config else "ours"
        write_text_atomically(path, text)

    def train(self, run: RunFolder, *, is_new: bool) -> None:
        if is_new:
            run.start(emit=ignore)
            for file in (run.config_file, run.metrics_file):
                self.write(file)
        for step in (2, 4):
            with suppress(FileExistsError):
                names, under = names_of_checkpoint(["model"]), f"checkpoints/step-{step}"
                with run.own.replacing(under, *names, last=MANIFEST_NAME) as partial:
                    for name in names:
                        self.write(partial / name)
        with run.finishing(["vocab.txt", "config.json"]) as partial:
            for name in ("model.safetensors", "vocab.txt", "config.json"):
                self.write(partial / name)
        for file in (run.inference_file, run.predictions_file, run.results_file):
            self.write(file)
        self.report(run)
        run.delete_checkpoints()

    def report(self, run: RunFolder) -> None:
        run.check_names()
        run.claim(run.report_file, run.card_file)
        self.write(run.report_file)
        self.write(run.card_file)

    def run(self) -> None:
        with RunFolder(self.folder).create(overwrite=self.chance.random() < 0.7) as run:
            self.train(run, is_new=True)

    def resume(self) -> None:
        flags = {"output_dir": str(self.folder)}
        loaded = load_config(file=None, environment={}, flags=flags, assignments=())
        work = choose_work(Work(loaded.config, loaded.sources), "auto", emit=ignore)
        with work.lock() as run:
            if work.resumed:
                run.check_names()
            self.train(run, is_new=not work.resumed)

    def seeds(self) -> None:
        with SeedsFolder(self.folder).create(overwrite=True):
            folder = SeedsFolder(self.folder)
            folder.start(emit=ignore)
            self.write(folder.table_file)
            for seed in (42, 43):
                with folder.run(seed).create(overwrite=True) as run:
                    self.train(run, is_new=True)

    def report_again(self) -> None:
        with RunFolder(self.folder).lock() as run:
            self.report(run)

    def export(self) -> None:
        run = RunFolder(self.folder)
        places = [OwnFolder(self.folder / "onnx", "onnx"), OwnFolder(self.folder, "onnx")]
        if run.own.is_ours:
            places.append(OwnFolder(self.folder / "onnx", "onnx", parent=run.own))
        own = self.chance.choice(places)
        with own.make(), own.replacing("", "model.onnx", "config.json", last="config.json") as one:
            self.write(one / "model.onnx")
            self.write(one / "config.json")

    def bench(self) -> None:
        name = self.chance.choice(["bench", "find-batch"])
        OwnFolder(self.folder, name).write_all({f"{name}.json": {}, f"{name}.svg": "<svg>"})

    def predict(self) -> None:
        output = self.folder / self.chance.choice(["x.csv", "metrics.jsonl", "new.jsonl"])
        check_output(output, source=self.folder / "x.csv.partial", overwrite=False)
        with prediction_file(output) as write:
            write([Prediction("text", {"label": "a"}, {"a": 0.9})])

    def compare(self) -> None:
        output = self.folder / self.chance.choice(NAMES)
        check_output_file(output, overwrite=False)
        write_text_atomically(output, "page")

    def cache(self) -> None:
        store = TensorStore(self.folder / "features", limit_bytes=self.chance.choice([1, 200, 900]))
        is_kept = store.make_room(200)
        store.write(self.chance.choice("ab") * 64, {"x": torch.ones(8)}, is_kept=is_kept, notes={})
        if self.chance.random() < 0.5:
            store.clear()

    def work(self) -> None:
        actions: list[Callable[[], None]] = [
            *(self.run, self.run, self.resume, self.resume, self.seeds, self.report_again),
            *(self.export, self.bench, self.predict, self.compare, self.cache),
        ]
        with suppress(FinetuneError, OSError, Killed):
            self.chance.choice(actions)()


def plant(chance: random.Random, folder: Path, outside: Path) -> dict[Path, bytes | str]:
    """Put files and links where there are none, and return them with what they hold."""
    planted: dict[Path, bytes | str] = {}
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    listed = {
        marker.parent / name
        for marker in folder.rglob(".finetune.jsonl")
        for name in (*OwnFolder(marker.parent, "run").names, *SeedsFolder(marker.parent).own.names)
    }
    for _ in range(chance.randrange(6)):
        path = chance.choice([folder, chance.choice(folders)]) / chance.choice(NAMES)
        # A file under a name that a run has listed is taken for the run's.
        if os.path.lexists(path) or path in listed or path.is_relative_to(outside):
            continue
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if chance.random() < 0.15:
                path.symlink_to(outside if chance.random() < 0.5 else outside / "dear.txt")
                planted[path] = os.readlink(path)
            else:
                path.write_bytes(chance.randbytes(chance.choice([0, 9])))
                planted[path] = path.read_bytes()
    return planted


def assert_kept(planted: dict[Path, bytes | str], seed: int) -> None:
    for path, content in planted.items():
        found = os.readlink(path) if isinstance(content, str) else path.read_bytes()
        assert found == content, (seed, path)


@pytest.mark.parametrize(
    "seeds",
    [range(TREES or 60), pytest.param(range(2_000), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_no_byte_of_others_is_lost_or_changed(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        place = tmp_path / str(seed)
        folder, outside = place / "folder", place / "outside"
        outside.mkdir(parents=True)
        (outside / "dear.txt").write_text("dear")
        machine, planted = Machine(seed, folder), dict[Path, bytes | str]()
        begins_foreign = machine.chance.random() < 0.3
        for turn in range(machine.chance.randint(2, 8)):
            if machine.chance.random() < (0.5 if turn else begins_foreign):
                folder.mkdir(exist_ok=True)
                planted |= plant(machine.chance, folder, outside)
            machine.work()
            assert_kept(planted, seed)
            assert (outside / "dear.txt").read_text() == "dear"
        shutil.rmtree(place)


def test_a_killed_run_is_started_again_and_ends_without_leftovers(tmp_path: Path) -> None:
    """At any moment: in the middle of a file, before a checkpoint, in the middle of the end."""
    ends = []
    for seed in range(60):
        machine = Machine(seed, tmp_path / str(seed))
        for _ in range(100):
            try:
                machine.resume()
                break
            except Killed:
                continue
        run = RunFolder(machine.folder)
        assert run.has_finished
        ends.append(sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*")))
    assert all(end == ends[0] for end in ends)
    assert not any(".partial" in name for name in ends[0])
