"""The commands in which operations on files fail, each with a tiny model and a tiny table."""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pandas
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from driver import Command
from hub_server import HubServer
from starlette.testclient import TestClient
from tiny_models import save_tiny_model

from finetune.commands.flags import load
from finetune.commands.label import open_session, review_suspects
from finetune.commands.main import main
from finetune.data.read import WRITERS
from finetune.errors import explain
from finetune.web.labeling import LabelingSession, make_label_app

torch.set_num_threads(1)

QUICK = [
    *("--device", "cpu", "--precision", "fp32", "--batch-size", "8", "--eval-batch-size", "8"),
    *("--validation-fraction", "0.2", "--test-fraction", "0.2"),
]
STEPS = ("--max-steps", "2", "--learning-rate", "1e-3", "--logging-steps", "1", "--save-steps", "1")
# Caches may have any content, warnings depend on faults, and the model card has times.
CACHES = r"(cache|hf|tmp)(/|$)"
WARNINGS = r".*(warnings\.jsonl|README\.md)"
# A resumed run lists its columns in another order.
OF_SEEDS = rf"{WARNINGS}|.*(manifest\.json|environment\.json|SHA256SUMS)"
# What a run writes bit by bit. The results are not among it.
GROWS = r"((metrics|warnings)\.jsonl|checkpoints.*|manifest\.json|config\.yaml|environment\.json)"
RUN = rf"out(/{GROWS}|/seed-\d+(/{GROWS})?|/seeds\.json)?$"


def cli(*arguments: str) -> Callable[[], object]:
    """Return a function that runs the command line."""
    return lambda: main([*arguments])


def write_table(box: Path) -> None:
    lines = [f"what is {row}?,{('even', 'odd')[row % 2]}" for row in range(20)]
    (box / "rows.csv").write_text("\n".join(["text,label", *lines, ""]))


def write_inputs(box: Path) -> None:
    write_table(box)
    save_tiny_model(box / "model", num_hidden_layers=1)


def call(*arguments: str) -> None:
    with suppress(SystemExit):
        main([*arguments])


def write_run(box: Path) -> None:
    """Write a finished run."""
    write_inputs(box)
    call("run", "rows.csv", "--model", "model", "--output-dir", "out", *QUICK, *STEPS)


def write_unfinished_run(box: Path) -> None:
    """Write a run that was stopped after its first step."""
    from tiny_runs import at, press_ctrl_c

    import finetune
    from finetune.events import Step

    write_inputs(box)
    with suppress(KeyboardInterrupt):
        finetune.run("rows.csv", model="model", output_dir="out", device="cpu", precision="fp32",
                     batch_size=8, eval_batch_size=8, validation_fraction=0.2, test_fraction=0.2,
                     max_steps=2, learning_rate=1e-3, logging_steps=1, save_steps=1,
                     emit=at(Step, 1, press_ctrl_c))  # fmt: skip


def run(name: str, *arguments: str, every: int, may_differ: str = WARNINGS) -> Command:
    words = ("run", "rows.csv", "--model", "model", "--output-dir", "out", *QUICK, *arguments)
    act = cli(*words, "--resume-from-checkpoint", "auto")
    return Command(name, write_inputs, act, RUN, CACHES, may_differ, every)


def of_run(
    name: str, *arguments: str, prepare: Callable[[Path], None] = write_run, every: int = 1
) -> Command:
    """Return a command that reads a finished run."""
    act = cli(*arguments)
    return Command(name, prepare, act, own=CACHES, may_differ=WARNINGS, every=every)


def predict(suffix: str) -> Command:
    """Return a command that replaces an old file of predictions, in a format."""

    def prepare(box: Path) -> None:
        write_run(box)
        (box / f"predictions{suffix}").write_text("old")
        table = pandas.DataFrame({"text": ["what is 1?", "what is 2?"]})
        table.to_excel(box / "texts.xlsx", index=False)

    # A workbook keeps its formats, so columns are added to a copy.
    source = "texts.xlsx" if suffix == ".xlsx" else "rows.csv"
    words = ("predict", "out", source, "--device", "cpu", "--runtime", "torch")
    return of_run(
        "predict-" + suffix[1:], *words, "--output", f"predictions{suffix}", "--overwrite",
        prepare=prepare, every=3,
    )  # fmt: skip


def label_all(open_it: Callable[[], LabelingSession], names: list[str]) -> None:
    """Label rows as the page does; click again if an answer is an error."""
    try:
        session = open_it()
    except Exception as error:
        known = explain(error)
        if known is None:
            raise
        sys.stderr.write(f"error: {known.message}\n  try: {known.remedy}\n")
        sys.exit(known.exit_code)
    app, failed = make_label_app(session, name="texts", hosts=["testserver"], token="secret"), ""
    client = TestClient(app, headers={"Authorization": "Bearer secret"})
    for number in range(len(session.texts[0])):
        if number in session.journal.labels.rows:
            continue
        body = {"row": number + 1, "label": names[number % len(names)]}
        for _ in range(2):
            answer = client.post("/api/label", json=body)
            if answer.status_code == 200:
                break
            sys.stderr.write(f"warning: {answer.text}\n")
        else:
            failed = answer.json()["error"]
    with suppress(Exception):
        session.stop()
    if failed:
        sys.stderr.write(f"error: {failed}\n  try: again\n")
        sys.exit(1)


def label() -> None:
    options = load(data="texts.txt", classes="even,odd", model="model")
    label_all(lambda: open_session(options, is_multi=False), ["even", "odd"])


def label_suspects() -> None:
    options = load(data="rows.csv", model="model")
    label_all(lambda: review_suspects(options), ["even", "odd"])


def write_texts(box: Path) -> None:
    write_inputs(box)
    (box / "texts.txt").write_text("".join(f"what is {row}?\n" for row in range(20)))


def write_audit(box: Path) -> None:
    write_inputs(box)
    rows = (box / "rows.csv").read_text().replace("what is 3?,odd", "what is 3?,even")
    (box / "rows.csv").write_text(rows)
    call("data", "audit", "rows.csv", "--model", "model", "--device", "cpu")


def write_corrected(box: Path) -> None:
    write_audit(box)
    suspects = pandas.read_csv(box / "audits/rows/suspects.csv", dtype=str)
    suspects["decision"] = "keep"
    suspects.to_csv(box / "audits/rows/suspects.csv", index=False)


def push() -> None:
    from hub_server import hub_client

    uploads = Path.cwd().parent / "hub"
    shutil.rmtree(uploads, ignore_errors=True)
    with (
        HubServer(uploads=uploads) as server,
        hub_client(endpoint=server.endpoint, home=Path("hf").absolute()),
    ):
        os.environ["HF_TOKEN"] = "hf_" + "s3cret" * 6
        main(["push", "out", "ada/questions"])


def write_cache(box: Path) -> None:
    write_inputs(box)
    words = ("run", "rows.csv", "--model", "model", "--output-dir", "out", *QUICK)
    call(*words, "--freeze-core")


COMMANDS = {
    command.name: command
    for command in (
        run("run", *STEPS, every=2),
        run("run-head", "--freeze-core", every=4),
        run("run-few", "--max-steps", "2", every=4),
        Command(
            "resume", write_unfinished_run,
            # The digests are deleted first, because the files change from then on.
            cli("run", "--resume-from-checkpoint", "out"), RUN, rf"{CACHES}|out/SHA256SUMS$",
            WARNINGS, 2,
        ),
        *map(predict, [suffix for suffix in WRITERS if suffix != ".xlsm"]),  # only as a copy
        Command("label", write_texts, label, r"texts\.labels\..*", CACHES),
        Command("suspects", write_audit, label_suspects, r"audits/rows/.*", CACHES),
        of_run("evaluate", "evaluate", "out", "rows.csv", "--device", "cpu"),
        run("seeds", *STEPS, "--seeds", "2", every=12, may_differ=OF_SEEDS),
        of_run("onnx", "export", "onnx", "out", every=20),
        of_run("report", "report", "out"),
        of_run("audit", "data", "audit", "rows.csv", "--model", "model", "--device", "cpu",
               prepare=write_inputs, every=3),
        of_run("audit-corrected", "data", "audit", "rows.csv", "--model", "model", "--device",
               "cpu", "--corrections", "audits/rows/suspects.csv", "--output-dir", "found",
               prepare=write_corrected, every=6),
        of_run("check", "data", "check", "rows.csv", "--model", "model", prepare=write_inputs),
        Command("push", write_run, push, own=CACHES),
        Command("cache-clear", write_cache, cli("cache", "clear")),
    )
}  # fmt: skip
