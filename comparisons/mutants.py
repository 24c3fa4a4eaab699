"""Share of seeded faults (mutants) in this package that the tests find.

    python comparisons/mutants.py --rooms training batch_finder data --mutants 20 --seed 0

A mutant is the last commit of the checkout ROOT with one expression of a room (a folder of
``finetune/``) changed: another operator, an integer plus one, a condition negated, None returned.
The seed chooses among all such changes to the room. The tests of the room look for the mutant in a
copy of the checkout and, if these pass, those that join rooms, all or every n-th (--every n). It is
found if a test fails, or if they take 20 seconds more than three times as long as without it.

A worker imports the large libraries once and forks for each mutant, which Windows can't.

The last line is JSON.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

LIBRARIES = ("hypothesis", "torch", "transformers", "datasets", "evaluate", "sklearn")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0")
JOINING = ("tests/pipeline", "tests/runs", "tests/api")  # those that the checkout has
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Div: ast.Mult},
    **{ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
}
NOT_RUN = {"annotation", "returns", "decorator_list"}


class Tests(NamedTuple):
    """Folders of tests, how many of their tests to run, and in how many seconds they must pass."""

    paths: list[str]
    every: int = 1
    limit: float | None = None


class Mutant(NamedTuple):
    """A file of a room with one change."""

    room: str
    file: str
    change: str
    source: bytes


def mutants_of(room: str, checkout: Path) -> list[Mutant]:
    """Return all mutants of a room."""
    mutants = []
    for path in sorted((checkout / "finetune" / room).rglob("*.py")):
        source, file = path.read_bytes(), str(path.relative_to(checkout))
        rows = source.splitlines(keepends=True)
        for node in walk(ast.parse(source)):
            for part, after in changes(node):
                start = len(b"".join(rows[: part.lineno - 1])) + part.col_offset
                end = len(b"".join(rows[: part.end_lineno - 1])) + part.end_col_offset
                before, mutated = source[start:end], source[:start] + after.encode() + source[end:]
                texts = [textwrap.shorten(text, 100) for text in (before.decode(), after)]
                change = f"{file}:{part.lineno}: {' -> '.join(texts)}"
                mutants.append(Mutant(room, file, change, mutated))
    return mutants


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, but no texts, annotations, decorators or assertions."""
    for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    if for_types or isinstance(node, ast.Assert | ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in NOT_RUN:
                yield from walk(child)


def changes(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """Yield what of a node to replace, and by what."""
    changed: Any = copy.copy(node)
    match node:
        case ast.Compare():
            for number, operator in enumerate(node.ops):
                swapped = SWAPS[type(operator)]()
                changed.ops = [*node.ops[:number], swapped, *node.ops[number + 1 :]]
                yield node, f"({ast.unparse(changed)})"
        case (
            ast.BinOp(left=ast.JoinedStr() | ast.Constant(value=str()))
            | ast.BinOp(right=ast.JoinedStr() | ast.Constant(value=str()))
        ):
            pass  # joins texts, or a path's parts
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() if type(node.op) in SWAPS:
            changed.op = SWAPS[type(node.op)]()
            text = ast.unparse(changed)
            yield node, text if isinstance(node, ast.AugAssign) else f"({text})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield value, "None"
        case ast.If(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):  # those are changed already
                yield test, f"(not ({ast.unparse(test)}))"


def prepare_worker(checkout: Path) -> None:
    """Import the large libraries, in the environment that the tests' conftest.py sets for them."""
    runpy.run_path(str(checkout / "tests" / "conftest.py"))
    for name in LIBRARIES:
        importlib.import_module(name)


class EveryNth:
    """Plugin of pytest that runs every n-th test."""

    def __init__(self, every: int) -> None:
        self.every = every

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the others."""
        items[:] = items[:: self.every]


def run_tests(folder: Path, tests: Tests) -> None:
    """Run tests of the folder's checkout within this process, and leave with pytest's code."""
    os.setsid()  # what the tests start is killed with them
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.chdir(folder / "checkout")
    sys.path[0] = os.environ["PYTHONPATH"] = str(folder / "checkout")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    sys.exit(pytest.main([*OPTIONS, *tests.paths], plugins=[EveryNth(tests.every)]))


def time_tests(tests: Tests, checkout: Path, mutant: Mutant | None = None) -> tuple[bool, float]:
    """Tell whether tests pass within their limit, and how many seconds they took."""
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)  # what was downloaded before
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        shutil.copytree(checkout, folder / "checkout")
        if mutant:
            (folder / "checkout" / mutant.file).write_bytes(mutant.source)
        started = time.monotonic()
        child = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, tests))
        child.start()
        child.join(tests.limit)
        seconds, passed = time.monotonic() - started, child.exitcode == 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        if not (mutant or passed):
            raise SystemExit((folder / "log").read_text(encoding="utf-8"))
    return passed, seconds


def find(mutant: Mutant, tests: dict[str, Tests], checkout: Path) -> tuple[str | None, float]:
    """Return which tests find a mutant, if any, and the seconds that this took."""
    seconds = 0.0
    for name in (mutant.room, "joining"):
        passed, more = time_tests(tests[name], checkout, mutant)
        seconds += more
        if not passed:
            return name, seconds
    return None, seconds


def main() -> None:
    """Time the tests without a mutant, then print a line a mutant and the shares found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", nargs="+", default=["training", "batch_finder", "data"])
    parser.add_argument("--mutants", type=int, default=20, help="of each room")
    parser.add_argument("--every", type=int, default=1, help="of the tests that join rooms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default=".")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkout, archive = Path(folder, "checkout"), f"{folder}/checkout.tar"
        command = ["git", "-C", arguments.root, "archive", "--output", archive, "HEAD"]
        subprocess.run(command, check=True)
        shutil.unpack_archive(archive, checkout)
        tests = {room: Tests([f"tests/{room}"]) for room in arguments.rooms}
        joining = [path for path in JOINING if (checkout / path).exists()]
        tests["joining"] = Tests(joining, arguments.every)
        mutants = []
        for room in arguments.rooms:
            candidates = mutants_of(room, checkout)
            number = min(arguments.mutants, len(candidates))
            mutants += random.Random(f"{arguments.seed} {room}").sample(candidates, number)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.processes, spawn, prepare_worker, (checkout,)) as pool:
            timed = pool.map(partial(time_tests, checkout=checkout), tests.values())
            for name, (_, seconds) in zip(list(tests), timed, strict=True):
                tests[name] = tests[name]._replace(limit=3 * seconds + 20)
                print(f"tests of {name} without a mutant: {seconds:.0f} s", flush=True)
            findings = []
            look = partial(find, tests=tests, checkout=checkout)
            for mutant, (finder, seconds) in zip(mutants, pool.map(look, mutants), strict=True):
                verdict = f"found by tests of {finder}" if finder else "survived"
                print(f"{mutant.change}: {verdict}, {seconds:.0f} s", flush=True)
                findings.append((mutant, finder))
    report(findings)


def report(findings: list[tuple[Mutant, str | None]]) -> None:
    """Print the share found of each room and of all, and the same as JSON."""
    figures = {}
    for room in [*dict.fromkeys(mutant.room for mutant, _ in findings), "all"]:
        finders = [finder for mutant, finder in findings if room in {mutant.room, "all"}]
        found = len(finders) - finders.count(None)
        print(f"{room}: {found} of {len(finders)} found ({found / len(finders):.0%})")
        by_joining = finders.count("joining")
        figures[room] = {"mutants": len(finders), "found": found, "found_by_joining": by_joining}
    survivors = [mutant.change for mutant, finder in findings if not finder]
    print(json.dumps({"rooms": figures, "survivors": survivors}))


if __name__ == "__main__":
    main()
