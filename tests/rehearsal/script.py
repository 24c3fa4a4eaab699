"""The commands to rehearse, with the options of a first run, and checks of their output."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.request import Request, urlopen

MAX_SECONDS = 300
# More epochs would only take more time.
EPOCH = ("--num-train-epochs", "1")


class Process(Protocol):
    """A command that runs."""

    pid: int

    def wait(self) -> int:
        """Return the exit code, negative after a signal."""


Start = Callable[[Sequence[str], Mapping[str, str], Path, Path], Process]
"""Starts a command, given its arguments, variables, working directory and output file."""


class StepError(Exception):
    """A command didn't behave as the script expects."""


@dataclass(frozen=True)
class Stage:
    """Where the commands run, and the device and precisions that they should choose.

    Args:
        folder: The working directory, with the tables and the runs.
        model: The folder of a small model.
        device: The name of the device.
        precisions: The precisions that ``--precision auto`` may choose.
        start: Starts a command.
        parity: The 16-bit precisions in which ``doctor --parity`` runs first.
        ranks: The number of processes that train together.
        variables: Variables of all commands.
    """

    folder: Path
    model: Path
    device: str
    precisions: tuple[str, ...]
    start: Start
    parity: tuple[str, ...] = ()
    ranks: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)

    def launch(self, *arguments: str, **variables: str) -> tuple[Process, Path]:
        """Start a command, and return its process and its output file."""
        output = self.folder / f"output-{len([*self.folder.glob('output-*')]):03}.txt"
        output.write_text(f"$ finetune {' '.join(arguments)}\n")
        cache = str(self.folder / "cache")
        paths = {"FINETUNE_MODEL": str(self.model), "HF_HOME": cache, "XDG_CACHE_HOME": cache}
        environment = {**paths, **self.variables, **variables}
        return self.start(arguments, environment, self.folder, output), output

    def run(self, *arguments: str) -> str:
        """Run a command, and return its output."""
        process, output = self.launch(*arguments)
        return check(process.wait(), output)

    def train(self, *arguments: str) -> str:
        """Run a command in all processes, and return the output of the main process."""
        if self.ranks == 1:
            return self.run(*arguments)
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        group |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.ranks))
        launched = [
            self.launch(*arguments, **group, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(self.ranks)
        ]
        codes = [process.wait() for process, _ in launched]
        outputs = [check(code, file) for code, (_, file) in zip(codes, launched, strict=True)]
        return outputs[0]

    def check_run(self, run: str, output: str) -> None:
        """Check the device and precision of a run, in its results and its output."""
        results = json.loads((self.folder / run / "all_results.json").read_text())
        expect(results["device"] == self.device, f"{run} ran on {results['device']}")
        expect(results["precision"] in self.precisions, f"{run} ran in {results['precision']}")
        expect(f"device: {self.device} (" in output, output)
        expect(f"precision: {results['precision']}, because " in output, output)


def expect(is_right: bool, failure: str) -> None:
    """Raise an error if something is not as the script expects."""
    if not is_right:
        raise StepError(failure)


def check(code: int, output: Path, *, expected: int = 0) -> str:
    """Return the output of a command, and check its exit code."""
    text = output.read_text(errors="replace")
    expect(code == expected and "Traceback" not in text, f"exit code {code}\n{text}")
    return text


def free_port() -> str:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def is_running(process: Process) -> bool:
    """Return whether a child process has not ended."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def wait_for(is_done: Callable[[], Any], process: Process, output: Path) -> None:
    """Wait until a condition is true, and fail if the process exits first."""
    ends_at = time.monotonic() + MAX_SECONDS
    while not is_done():
        expect(time.monotonic() < ends_at and is_running(process), output.read_text())
        time.sleep(0.01)


def write_tables(folder: Path) -> None:
    """Write small tables of each kind."""
    words = {"LOC": "city river mountain", "NUM": "how many year", "HUM": "who wrote author"}
    rows = [
        (f"what {text} is the {word} of {number} people", label)
        for number in range(5)
        for label, text in words.items()
        for word in ("name", "first", "animal", "color")
    ]
    few = [(text, label[: 9 * (len(text) % 3)]) for text, label in rows[:24]]
    several = [(text, f"{label == 'LOC':d},{label != 'HUM':d}") for text, label in rows]
    numbers = [(text, f"{len(text) / 7:.2f}") for text, _ in rows]
    long = [(" ".join([text] * 9), label) for text, label in rows]
    tables = {"rows": rows, "few": few, "several": several, "numbers": numbers, "long": long}
    columns = {"several": "text,place,number", "numbers": "text,score"}
    for name, table in tables.items():
        lines = [columns.get(name, "text,label"), *map(",".join, table), ""]
        (folder / f"{name}.csv").write_text("\n".join(lines))
    (folder / "new.txt").write_text("who wrote it\nhow many people\n")
    (folder / "texts.txt").write_text("\n".join(text for text, _ in rows))


def doctor(stage: Stage) -> None:
    output = stage.run("doctor")
    expect(f" uses {stage.device} (" in output, output)


def parity(stage: Stage) -> None:
    for precision in ("fp32", *stage.parity):
        options = ("--model", str(stage.model), "--precision", precision)
        output = stage.run("doctor", "--parity", *options)
        expect(f"{stage.device} in {precision} agrees with the CPU" in output, output)


def training(table: str, name: str, *options: str) -> Callable[[Stage], None]:
    def train(stage: Stage) -> None:
        output = stage.train("run", table, "--output-dir", name, *options)
        stage.check_run(name, output)
        expect(f"report: {name}/report.html" in output, output)

    return train


def several(kind: str, count: int) -> Callable[[Stage], None]:
    def train(stage: Stage) -> None:
        options = (f"--{kind}", str(count), "--output-dir", kind, *EPOCH)
        output = stage.run("run", "rows.csv", *options)
        runs = [*stage.folder.glob(f"{kind}/*/all_results.json")]
        expect(len(runs) == count, output)
        for file in runs:
            stage.check_run(f"{kind}/{file.parent.name}", output)

    return train


def kill_and_resume(stage: Stage) -> None:
    saving = ("--save-strategy", "steps", "--save-steps", "2", "--num-train-epochs", "5")
    process, output = stage.launch("run", "rows.csv", "--output-dir", "killed", *saving)
    wait_for(lambda: [*stage.folder.glob("killed/checkpoints/step-[4-9]")], process, output)
    os.kill(process.pid, signal.SIGKILL)
    check(process.wait(), output, expected=-signal.SIGKILL)
    resumed = stage.train("run", "--resume-from-checkpoint", "killed")
    expect("resuming" in resumed and "report: killed/report.html" in resumed, resumed)


def evaluate(stage: Stage) -> None:
    output = stage.train("evaluate", "full")
    expect("accuracy" in output, output)


def predict_text(stage: Stage) -> None:
    output = stage.run("predict", "full", "Who wrote Faust?", "--all-scores")
    expect("Who wrote Faust?" in output, output)


def predict_file(stage: Stage) -> None:
    for run in ("few", "windows", "lora", "numbers"):
        stage.run("predict", run, "new.txt", "--output", f"{run}-labeled.csv")
        lines = (stage.folder / f"{run}-labeled.csv").read_text().splitlines()
        expect(len(lines) == 3, f"{run}: {lines}")


def compare(stage: Stage) -> None:
    output = stage.run("compare", "full", "head")
    expect("head" in output, output)


def report(stage: Stage) -> None:
    stage.run("report", "full")


def export(stage: Stage) -> None:
    stage.run("export", "onnx", "full")
    expect((stage.folder / "full" / "onnx" / "model.onnx").exists(), "no model.onnx")


def check_data(stage: Stage) -> None:
    output = stage.run("data", "check", "rows.csv")
    expect("54 training rows, 3 classes: a linear head" in output, output)


def audit_data(stage: Stage) -> None:
    stage.run("data", "audit", "rows.csv", "--output-dir", "audit")
    expect((stage.folder / "audit" / "suspects.csv").exists(), "no suspects.csv")


def find_batch(stage: Stage) -> None:
    output = stage.run("find-batch", "rows.csv", "--limit", "4")
    expect(f"searching on {stage.device}" in output and "failed" not in output, output)


@contextmanager
def served(stage: Stage, *arguments: str) -> Iterator[Callable[..., Any]]:
    """Start a server, yield a function that sends a request, and stop the server."""
    process, output = stage.launch(*arguments, "--json")

    def address() -> str:
        lines = [line for line in output.read_text().splitlines() if line.startswith("{")]
        return str(json.loads(lines[0])["address"]) if lines else ""

    wait_for(address, process, output)
    base, _, token = address().partition("/?token=")

    def request(path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(base + path, data, headers), timeout=60) as response:
            return json.load(response)

    try:
        yield request
    finally:
        os.kill(process.pid, signal.SIGTERM)
        code = process.wait()
    check(code, output)


def label(stage: Stage) -> None:
    options = ("--classes", "LOC,NUM,HUM", "--no-browser")
    with served(stage, "label", "new.txt", *options) as request:
        ends_at = time.monotonic() + MAX_SECONDS
        while (status := request("/api/status"))["features"] < 1:
            expect(time.monotonic() < ends_at and not status["error"], str(status))
            time.sleep(0.02)
        row = request("/api/next")["row"]
        status = request("/api/label", {"row": row, "label": "HUM"})
        expect(status["labeled"] == 1 and not status["error"], str(status))
    expect("HUM" in (stage.folder / "new.labels.csv").read_text(), "the label is not saved")


def serve(stage: Stage) -> None:
    with served(stage, "serve", "full", "--port", "0") as request:
        [[answer]] = request("/predict", {"inputs": ["Who wrote Faust?"]})
        expect(0 < answer["score"] <= 1, str(answer))


_WINDOWS = ("--long-texts", "windows", "--max-length", "32", "--stride", "8", *EPOCH)
STEPS: Mapping[str, Callable[[Stage], None]] = {
    "doctor": doctor,
    "doctor --parity": parity,
    "run": training("questions", "full", *EPOCH),
    # Several ranks train a head with gradient descent, which would take 2,600 steps on all rows.
    "run --freeze-core": training(
        "questions", "head", "--freeze-core", "--max-train-samples", "64"
    ),
    "run --train-layers 2": training("rows.csv", "last", "--train-layers", "2", *EPOCH),
    "run --lora-rank 8": training("rows.csv", "lora", "--lora-rank", "8", *EPOCH),
    "run with few labels": training("few.csv", "few"),
    "run without labels": training("texts.txt", "unlabeled", "--classes", "LOC,NUM,HUM"),
    "run with several labels": training(
        "several.csv", "several", "--label-column", "place,number", *EPOCH
    ),
    "run with numbers": training("numbers.csv", "numbers", *EPOCH),
    "run --long-texts windows": training("long.csv", "windows", *_WINDOWS),
    "run --batch-size auto": training("rows.csv", "auto", "--batch-size", "auto", *EPOCH),
    "run --seeds 2": several("seeds", 2),
    "run --folds 3": several("folds", 3),
    "kill and resume": kill_and_resume,
    "evaluate": evaluate,
    "predict a text": predict_text,
    "predict a file": predict_file,
    "compare": compare,
    "report": report,
    "export onnx": export,
    "data check": check_data,
    "data audit": audit_data,
    "find-batch": find_batch,
    "label": label,
    "serve": serve,
}
