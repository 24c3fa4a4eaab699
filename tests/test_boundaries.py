"""Rules of the architecture that linters don't check."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "finetune"
HEAVY = {"torch", "transformers", "pydantic", "datasets", "accelerate"}
TRAINING_ONLY = {"evaluate", "sklearn"}


def places_outside(*packages: str, breaks_rule: Callable[[ast.AST], bool]) -> list[str]:
    """List ``file:line`` of every node outside the packages (or modules) that breaks a rule."""
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not any(path.is_relative_to(PACKAGE / package) for package in packages)
        for node in _nodes(path)
        if isinstance(node, ast.expr | ast.stmt) and breaks_rule(node)
    ]


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a node reads or imports, such as ``torch.cuda``."""
    match node:
        case ast.Name() | ast.Attribute():
            yield ast.unparse(node)
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom(module=str(module)):
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_only_devices_and_the_schema_contain_device_names() -> None:
    def spells_device(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and node.value in ("mps", "cuda")

    # The Literal in the schema lists the choices for --help.
    assert places_outside("devices", "config/schema.py", breaks_rule=spells_device) == []


def test_only_devices_uses_torch_backends() -> None:
    def reaches_into_backend(node: ast.AST) -> bool:
        return any(
            name.startswith(("torch.cuda", "torch.mps", "torch.backends"))
            for name in names_in(node)
        )

    assert places_outside("devices", breaks_rule=reaches_into_backend) == []


def test_only_one_module_uses_private_library_names() -> None:
    private = re.compile(
        r"(torch|transformers|datasets|tokenizers|accelerate|peft)(\.\w+)*\._[a-z]"
    )

    def is_private(node: ast.AST) -> bool:
        return any(private.match(name) for name in names_in(node))

    assert places_outside("devices/private.py", breaks_rule=is_private) == []


def test_only_commands_write_to_the_terminal() -> None:
    def writes_to_terminal(node: ast.AST) -> bool:
        return not {"print", "click.echo", "sys.stdout", "sys.stderr"}.isdisjoint(names_in(node))

    # classify.py is the command-line program of a bundle.
    assert places_outside("commands", "classify.py", breaks_rule=writes_to_terminal) == []


def test_architecture_page_lists_exactly_the_modules() -> None:
    text = (PACKAGE.parent / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.partition("## Packages and modules")[2].partition("    comparisons/")[0]
    # The tree has a single line for commands/.
    modules = {path.name for path in PACKAGE.rglob("*.py") if path.parent.name != "commands"}
    listed = set(re.findall(r"\w+\.py\b", tree))
    assert listed == modules - {"__main__.py"}


def test_files_listed_in_the_architecture_page_exist() -> None:
    text = (PACKAGE.parent / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("| to add | change |")[2].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+(?:/|\.py|\.yaml|\.html\.j2))`", table)
    assert len(files) > 12
    assert [file for file in files if not (PACKAGE / file).exists()] == []


def assert_not_loaded(unused: dict[str, set[str]]) -> None:
    """Import modules in one process, and check that each avoids these packages."""
    report = 'print(*(name for name in sys.modules if "." not in name), file=sys.stderr)'
    code = "\n".join(f"import {module}\nimport sys; {report}" for module in unused)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    loaded = process.stderr.splitlines()[-len(unused) :]
    for (module, names), line in zip(unused.items(), loaded, strict=True):
        assert {*line.split()} & names == set(), module


def test_light_modules_do_not_import_heavy_packages() -> None:
    light = (
        "finetune",
        "finetune.errors",
        "finetune.events",
        "finetune.config.schema",
        "finetune.devices",
        "finetune.commands.main",
        # The child process of this module can start before PyTorch is imported.
        "finetune.commands.bench",
    )
    # Modules with fewer imports come first.
    assert_not_loaded(
        dict.fromkeys(light, HEAVY)
        | {
            "finetune.runs.compare": {"torch", "transformers", "datasets", "pyarrow"},
            "finetune.report.card": TRAINING_ONLY | {"torch", "transformers", "datasets"},
            "finetune.report.page": TRAINING_ONLY | {"torch", "transformers", "datasets"},
        }
    )


@pytest.mark.slow
def test_predicting_does_not_import_training_packages() -> None:
    unused = TRAINING_ONLY | {"datasets", "pandas", "pyarrow"}
    assert_not_loaded({"finetune.runs.trained": unused})


def test_modules_have_acyclic_imports() -> None:
    imported = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): {
            name
            for node in _nodes(path)
            for name in names_in(node)
            if name.startswith(f"{PACKAGE.name}.")
        }
        for path in PACKAGE.rglob("*.py")
    }
    TopologicalSorter(imported).prepare()  # raises CycleError
