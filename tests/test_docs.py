"""What exists is documented, and what is documented exists.

The registries of the code are the options, commands, errors, variables, extras, file names, JSON
keys and endpoints. docs/reference.md has most of them.
"""

import ast
import re
import signal
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path, PurePath

import click
import pytest
import yaml

import finetune
from finetune import errors, ownership
from finetune.commands.main import cli
from finetune.config.load import ENVIRONMENT_PREFIX, OTHER_VARIABLES
from finetune.config.schema import OPTIONS
from finetune.files import SUMS

ROOT = Path(__file__).parents[1]
PACKAGE = Path(finetune.__file__).parent
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
    if path.name != "measurements.md"
}
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
CODE = re.compile(r"`([^`\n]+)`")
VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
# Constants with the form of a variable.
NOT_VARIABLES = {"CUBLAS_STATUS_ALLOC_FAILED", "FEAT_BF16", "LABEL_0", "SEQ_CLS"}


def section(page: str, title: str) -> str:
    """Return the text under a heading, up to the next heading of the same level."""
    _, _, text = PAGES[page].partition(f"\n## {title}\n")
    assert text, (page, title)
    return text.partition("\n## ")[0]


def first_cells(text: str) -> Iterator[str]:
    """Yield the first cell of each row of the tables in a text."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield line.split("|")[1].strip()


def code_in(text: str) -> set[str]:
    """Return the names in code style."""
    return {*CODE.findall(text)}


def commands(
    group: click.Group = cli, name: str = "finetune"
) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands and subcommands with their full names."""
    context = click.Context(group)
    for part in group.list_commands(context):
        command = group.get_command(context, part)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {part}")
        else:
            yield f"{name} {part}", command


def test_pages_mention_every_command() -> None:
    text = "\n".join(PAGES.values())
    missing = [name for name, _ in commands() if name not in text]
    missing = [name for name in missing if name.partition(" ")[2] not in code_in(text)]
    assert missing == []


def test_help_describes_every_parameter() -> None:
    for name, command in commands():
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help or parameter.hidden, (name, parameter.name)
            elif not isinstance(parameter.type, click.Choice):  # lists its values in the usage
                shown = parameter.make_metavar(click.Context(command)).strip("[].")
                assert shown.lower() in str(command.help).lower(), (name, shown)


def test_help_states_defaults_as_they_are() -> None:
    run = dict(commands())["finetune run"]
    shown = {parameter.name: parameter for parameter in run.params}
    for option in OPTIONS.values():
        # A switch has no default to state, and without a default nothing is set.
        if isinstance(option.default, bool) or option.default is None:
            continue
        parameter = shown[option.name]
        assert isinstance(parameter, click.Option)
        text = parameter.get_help_record(click.Context(run))
        stated = str(option.default).replace("_", "-")
        assert text is not None
        assert f"[default: {stated}" in text[1].replace("_", "-"), option.name


def test_exit_codes_of_errors_and_signals_are_documented() -> None:
    def kinds(kind: type[errors.FinetuneBaseError]) -> Iterator[type[errors.FinetuneBaseError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from kinds(child)

    codes = {0} | {kind.exit_code for kind in kinds(errors.FinetuneError)}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        stopped = errors.InterruptionError("stopped", remedy="run it again", signal_number=number)
        codes.add(stopped.exit_code)
    cells = [*first_cells(section("reference.md", "Exit codes"))][1:]
    assert {int(code) for cell in cells for code in cell.split(", ")} == codes
    assert {*map(int, re.findall(r"\b\d+\b", str(cli.help)))} == codes


def variables_in_code() -> set[str]:
    """Return the environment variables that the package reads or sets."""
    found = set()
    for text in SOURCES.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if VARIABLE.fullmatch(node.value) else set()
        found |= {*re.findall(r"environ(?:\.\w+)?[\[(]\"(\w+)\"", text)}
    return (found | {"RANK"}) - NOT_VARIABLES


def test_environment_variables_are_documented_and_exist() -> None:
    documented = {
        name
        for cell in first_cells(section("reference.md", "Environment variables"))
        for name in CODE.findall(cell)
    }
    used = variables_in_code()
    assert used <= documented | {f"{ENVIRONMENT_PREFIX}OPTION"}
    elsewhere = documented - used - {f"{ENVIRONMENT_PREFIX}OPTION"}
    libraries = {"HF_": "huggingface_hub", "NO_COLOR": "rich"}
    for name in elsewhere:
        library = next(package for prefix, package in libraries.items() if name.startswith(prefix))
        folder = Path(str(find_spec(library) and find_spec(library).origin)).parent  # type: ignore[union-attr]
        assert any(f'"{name}"' in path.read_text() for path in folder.glob("*.py")), name


def test_pages_and_messages_mention_only_documented_variables() -> None:
    documented = code_in(section("reference.md", "Environment variables"))
    # Variables of other programs, in examples and notes of docs/devices.md and docs/deployment.md.
    documented |= {"GLOO_SOCKET_IFNAME", "SLURM_JOB_NODELIST", "SLURM_NODEID", "TREC_DIR"}
    options = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in OPTIONS} | OTHER_VARIABLES
    for page, text in PAGES.items():
        for name in {*VARIABLE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))}:
            if name.startswith(ENVIRONMENT_PREFIX):
                assert name in options | {f"{ENVIRONMENT_PREFIX}OPTION"}, (page, name)
            elif name.split("_")[0] in ("HF", "OMP", "NCCL", "GLOO", "SLURM", "PYTORCH", "MASTER"):
                assert name in documented, (page, name)


def test_extras_are_documented_and_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].keys()
    cells = [*first_cells(section("reference.md", "Extras"))][1:]
    assert {name for cell in cells for name in CODE.findall(cell)} == extras
    for text in [*PAGES.values(), *SOURCES.values(), (ROOT / "Makefile").read_text()]:
        for names in re.findall(r"'\.\[([\w,]+)\]'", text):
            assert {*names.split(",")} <= extras
        for name in re.findall(r"\b[Tt]he extra [`']+(\w+)|[Tt]he `(\w+)` extra", text):
            assert "".join(name) in extras


def test_files_of_folders_are_documented_and_exist() -> None:
    text = section("reference.md", "Files") + section("deployment.md", "The run folder")
    # The names depend on the tokenizer, and the pages call them "tokenizer".
    tokenizers = {*ownership._MODEL} - {"config.json", "README.md", SUMS}
    documented = {
        PurePath(name).name for name in re.findall(rf"[\w./-]+\.\w+|Dockerfile|{SUMS}", text)
    }
    owned = {
        PurePath(re.sub(r"(\[0-9a-f\])+", "DIGEST", name)).name
        for names in ownership.NAMES.values()
        for name in names
        if not name.startswith("tensorboard/")
    }
    assert owned - tokenizers <= documented
    assert documented - owned <= {"manifest.json", "deployment.md", "data.md"}


# Commands in the section on JSON, in code style like keys.
NAMED = {"cache", "doctor", "init"}


def test_json_keys_are_documented_and_exist() -> None:
    recorded = yaml.safe_load((ROOT / "tests/schema.yaml").read_text(encoding="utf-8"))["keys"]
    keys = {key for paths in recorded.values() for path in paths.split() for key in path.split(".")}
    # Names of splits, classes, runs and metrics of the recorded examples.
    keys -= {"*", "a", "b", "item", "train", "trial-1", "trial-2", "schema_version"}
    for prefix in ("eval_", "test_"):
        keys -= {key for key in keys if key.removeprefix(prefix) in keys - {key}}
    text = section("reference.md", "JSON")
    documented = {key for key in code_in(text) if re.fullmatch("[a-z][a-z0-9_]*", key)}
    assert keys - documented == set()
    assert (
        documented - keys <= {"eval_", "test_", "test_intervals", "sweep", "schema_version"} | NAMED
    )


@pytest.mark.parametrize(
    ("page", "title", "module"),
    [("serving.md", None, "serve_app"), ("labeling.md", "From a script", "labeling")],
)
def test_endpoints_are_documented_and_exist(page: str, title: str | None, module: str) -> None:
    source = (PACKAGE / f"web/{module}.py").read_text(encoding="utf-8")
    routes = {*re.findall(r'[Rr]oute\(\s*"(/[\w/]*)"', source)}
    text = section(page, title) if title else PAGES[page]
    cells = [cell for cell in first_cells(text) if re.search("GET|POST", cell)]
    assert len(cells) >= 4
    documented = {path for cell in cells for path in re.findall(r"(?:GET|POST) (/[\w/]*)", cell)}
    assert routes - documented == set()
    assert documented - routes <= {"/"}


def test_python_functions_are_documented() -> None:
    cells = first_cells(PAGES["python.md"])
    documented = {name for cell in cells for name in re.findall(r"`finetune\.(\w+)\(", cell)}
    assert documented == {*finetune.__all__}


# Numbers in sentences of a page: the page, words of the sentence, the constant, and a factor.
STATED = [
    ("batch-sizes.md", "largest", "batch_finder.search.TOLERANCE", 100),
    ("data.md", "validation split", "data.dataset.MIN_ROWS_TO_VALIDATE", 1),
    ("data.md", "held out", "data.dataset.DEFAULT_FRACTION", 100),
    ("data.md", "training rows", "runs.linear_head.MAX_ROWS", 1),
    ("data.md", "differ from a training row", "tasks.scores.NOTABLE", 100),
    ("data.md", "can have words", "audit.audit.MAX_EXPLAINED", 1),
    ("data.md", "in tables of up to", "audit.duplicates.MAX_COMPARED_ROWS", 1),
    ("data.md", "sampled", "audit.audit.MAX_ROWS", 1),
    ("deployment.md", "sentences", "evaluation.explain.MAX_WORDS", 1),
    ("deployment.md", "words", "evaluation.explain.MAX_CHANGES", 1),
    ("deployment.md", "characters", "data.write.EXCEL_CHARACTERS", 1),
    ("deployment.md", "test texts", "commands.export.MAX_BUNDLE_ROWS", 1),
    ("deployment.md", "int8", "commands.export.MAX_INT8_LOSS", 100),
    ("deployment.md", "test rows", "runs.words.MAX_ROWS", 1),
    ("few-labels.md", "rows per class", "runs.guess.MAX_ROWS_PER_CLASS", 1),
    ("few-labels.md", "steps", "training.plan.MIN_STEPS", 1),
    ("few-labels.md", "steps", "training.plan.MAX_STEPS", 1),
    ("few-labels.md", "texts", "training.plan.TEXTS_PER_STEP", 1),
    ("few-labels.md", "classes", "training.plan.CLASSES_PER_STEP", 1),
    ("few-labels.md", "texts are used", "training.linear_head.MAX_TEXTS", 1),
    ("few-labels.md", "prototype", "training.prototypes.ROUNDS", 1),
    ("few-labels.md", "mean", "training.linear_head.MEAN_CONFIDENCE", 1),
    ("labeling.md", "first", "web.labeling.FIRST_TEXTS", 1),
    ("labeling.md", "suggestions", "web.labeling.LAST_SUGGESTIONS", 1),
    ("labeling.md", "characters", "web.labeling.MAX_EXPLAINED_CHARACTERS", 1),
    ("labeling.md", "points", "tasks.explanation.MIN_MARKED", 100),
    ("modes.md", "epochs", "config.modes.MAX_HEAD_EPOCHS", 1),
    ("modes.md", "rows per class", "runs.guess.MAX_ROWS_PER_CLASS", 1),
    ("serving.md", "texts", "web.serve_app.MAX_TEXTS", 1),
    ("serving.md", "as long and works", "web.serve_app.MAX_EXPLAINED_TEXTS", 1),
    ("serving.md", "MiB", "web.server.MAX_BODY_BYTES", 2**-20),
    ("serving.md", "seconds", "web.server.DEADLINE_SECONDS", 1),
    ("serving.md", "client closed", "web.serve_app.CLIENT_LEFT", 1),
    ("training.md", "epochs", "config.modes.MIN_EPOCHS", 1),
    ("training.md", "epochs", "config.modes.MAX_FEW_ROWS_EPOCHS", 1),
    ("training.md", "checkpoints", "runs.checkpoint.MIN_SECONDS_BETWEEN", 1),
    ("training.md", "checkpoints", "runs.checkpoint.MAX_TIME_SHARE", 100),
    ("training.md", "large class", "tasks.scores.LARGE_CLASS", 100),
    ("training.md", "validation rows", "tasks.base.MIN_ROWS", 1),
    ("training.md", "misclassified", "tasks.base.MIN_MISTAKES", 1),
]


def read_constant(path: str) -> float:
    """Return a number of a module without importing the module, which may take seconds."""
    *modules, name = path.split(".")
    for node in ast.parse(SOURCES[PACKAGE.joinpath(*modules).with_suffix(".py")]).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            names = [*target.elts] if isinstance(target, ast.Tuple) else [target]
            values = [*value.elts] if isinstance(value, ast.Tuple) else [value]
            for each, number in zip(names, values, strict=False):
                if ast.unparse(each) == name:
                    return float(eval(ast.unparse(number), {}))
    raise AssertionError(f"there is no constant {path}")


@pytest.mark.parametrize(("page", "words", "constant", "factor"), STATED)
def test_numbers_in_pages_are_constants_of_the_code(
    page: str, words: str, constant: str, factor: float
) -> None:
    value = read_constant(constant) * factor
    shown = f"{round(value):,}" if value >= 10 else f"{value:.6g}"
    number = re.compile(rf"(?<![\d.,]){re.escape(shown)}(?!\d|[.,]\d)")
    sentences = re.split(r"(?<=[.:!?|])\s|\n\n", PAGES[page])
    lines = [" ".join(sentence.split()) for sentence in sentences]
    assert any(words in line and number.search(line) for line in lines), f"{words}: {shown}"


# Sentences with a measured number: accuracies with a decimal, results on TREC, and speeds.
MEASURED = re.compile(
    r"\d\.\d+%|\d%.*\b(?:TREC|questions|accuracy of)\b|\b(?:TREC|questions|accuracy of)\b.*\d%"
    r"|\d times\S* as (?:fast|long)"
)
NUMBER = re.compile(r"(?<![\w.,])\d+\.\d+(?=\D|$)|(?<![\w.,])\d[\d,]*(?:\.\d+)?(?=%| times\b)")
LOG = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
SOURCE_LINK = re.compile(r"\((?:docs/)?((?:measurements|benchmarks)\.md)#([\w-]+)\)")


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and list items, each with the picture above and the table below it."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r'<img[^>]* alt="([^"]*)">\s+', r"\1. ", text)
    for part in re.split(r"\n\n+(?!\|)|(?<!\|)\n(?=- |\d\. )", text):
        yield " ".join(part.split())


def cited(paragraph: str) -> str:
    """Return the sections of the measurements and the benchmarks that a paragraph links to."""
    found = ""
    for page, anchor in SOURCE_LINK.findall(paragraph):
        text = LOG if page == "measurements.md" else PAGES[page]
        for part in text.split("\n## ")[1:]:
            title = re.sub(r"[^\w -]", "", part.partition("\n")[0]).lower().replace(" ", "-")
            found += part if title == anchor else ""
    return found


def has_number(number: str, text: str) -> bool:
    """Return whether a text has a number, perhaps with more decimals."""
    value, decimals = float(number.replace(",", "")), len(number.partition(".")[2])
    return any(
        round(float(other.replace(",", "")), decimals) == value
        for other in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text)
    )


@pytest.mark.parametrize("page", sorted({*PAGES} - {"benchmarks.md", "reference.md"}))
def test_measured_numbers_of_pages_are_in_the_section_that_they_cite(page: str) -> None:
    for paragraph in paragraphs(PAGES[page]):
        words = CODE.sub("", paragraph)
        if not (MEASURED.search(words) or SOURCE_LINK.search(words)):
            continue
        source = cited(paragraph)
        assert source, f"link to a section of docs/measurements.md or benchmarks.md: {paragraph}"
        numbers = NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", words))
        assert [number for number in numbers if not has_number(number, source)] == [], paragraph


def test_each_section_of_the_benchmarks_has_a_command_or_a_source() -> None:
    table = LOG.partition("## Commands of the benchmarks")[2].partition("\n## ")[0]
    commands = [cell.partition(",")[0] for cell in first_cells(table)]
    for part in PAGES["benchmarks.md"].split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        assert title in commands or cited(text), title
        for paragraph in paragraphs(text):
            if source := cited(paragraph):
                numbers = NUMBER.findall(CODE.sub("", paragraph))
                assert [each for each in numbers if not has_number(each, source)] == [], paragraph


def remarks() -> Iterator[tuple[str, str]]:
    """Yield the docstrings and comments of the package that cite the measurements."""
    for path, text in SOURCES.items():
        lines = re.sub(r"^\s*# ?", "\0", text, flags=re.MULTILINE)
        for part in re.findall(r"(?:\0.*\n)+|\"\"\"[\s\S]*?\"\"\"", lines):
            for paragraph in part.split("\n\n"):
                if "docs/measurements.md" in paragraph:
                    yield path.name, " ".join(paragraph.replace("\0", " ").split())


def test_numbers_of_remarks_are_in_the_section_that_they_cite() -> None:
    found = [*remarks()]
    assert len(found) >= 15
    for file, remark in found:
        source = cited(re.sub(r"docs/(measurements\.md#[\w-]+)", r"(\1)", remark))
        assert source, f"cite a section, as docs/measurements.md#few-labels: {file}: {remark}"
        numbers = NUMBER.findall(re.sub(r"\(docs/[^)]*\)|``[^`]*``|95% interval", "", remark))
        assert [each for each in numbers if not has_number(each, source)] == [], (file, remark)
