"""Runs commands again and again, and makes the n-th operation on files fail in each.

``driver.py FOLDER COMMAND... [--every N] [--faults NAME...] [--part I/N]`` prints one JSON object
per command and fault. This program is the process from which commands are forked, so that they
import nothing again. The library that makes operations fail is preloaded into it.
"""

import argparse
import atexit
import ctypes
import gc
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

READS, CREATES, READ, WRITE, SYNC, CLOSE, RENAME, UNLINK, MKDIR, TRUNCATE, MMAP, COPY, LIST = (
    2**bit for bit in range(13)
)
CHANGES = CREATES | WRITE | SYNC | CLOSE | RENAME | UNLINK | MKDIR | TRUNCATE | COPY
KILLED = -1
TIMEOUT_SECONDS = 60
NOTHING = "(?!)"
TEMPORARY = re.compile(r"\.?[0-9a-f]{32}\.partial")


class State(ctypes.Structure):
    """What the library and this program share; as in faults.c."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("armed", "count", "first")),
        *((name, ctypes.c_long) for name in ("error", "stays", "operations")),
        ("failed", ctypes.c_char * 512),
    ]


@dataclass(frozen=True)
class Fault:
    """What happens to the n-th of some operations: an errno, or the end of the process."""

    error: int
    operations: int
    stays: bool = False

    @property
    def reason(self) -> str:
        """The words of the system for it."""
        return os.strerror(self.error)

    @property
    def blocks_cleaning(self) -> bool:
        """Whether the process can't delete its temporary files."""
        return self.error == KILLED or (self.stays and bool(self.operations & UNLINK))


def _faults() -> dict[str, Fault]:
    import errno

    space = CREATES | WRITE | SYNC | CLOSE | RENAME | MKDIR | TRUNCATE | COPY
    access = READS | CREATES | RENAME | UNLINK | MKDIR | LIST
    return {
        "ENOSPC": Fault(errno.ENOSPC, space),
        "ENOSPC stays": Fault(errno.ENOSPC, space, stays=True),
        "EIO": Fault(errno.EIO, CHANGES | READS | READ | MMAP | LIST),
        "EIO stays": Fault(errno.EIO, CHANGES | READS | READ | MMAP | LIST, stays=True),
        "EACCES": Fault(errno.EACCES, access),
        "EACCES stays": Fault(errno.EACCES, access, stays=True),
        # Elsewhere the system never returns it.
        "EINTR": Fault(errno.EINTR, READS | CREATES | READ | WRITE | SYNC | TRUNCATE),
        "SIGKILL": Fault(KILLED, CHANGES),
    }


FAULTS = _faults()


@dataclass(frozen=True)
class Command:
    """A command of the tool, and how its results are judged.

    ``prepare`` makes the files that the user has before. ``act`` runs the command. ``grows``
    matches files that the command writes bit by bit, so that they have other contents meanwhile.
    ``own`` matches files that the tool may delete, or fill with any content, such as caches.
    ``may_differ`` matches files whose content depends on how often the command was called.
    """

    name: str
    prepare: Callable[[Path], object]
    act: Callable[[], object]
    grows: str = NOTHING
    own: str = NOTHING
    may_differ: str = NOTHING
    every: int = 1
    """Slow commands fail at each of so many operations only, so that all take half an hour."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, minus the number of a signal, and what it printed."""

    code: int
    output: str
    errors: str
    stays: bool = False
    """Whether a child process outlived it."""


Files = dict[str, bytes]


@dataclass
class Driver:
    """Runs commands in a folder, in which files fail."""

    folder: Path
    state: State
    only: int | None = None
    volatile: set[str] = field(default_factory=set)

    @property
    def box(self) -> Path:
        """The folder with all files of the user and the tool."""
        return self.folder / "box"

    def call(self, act: Callable[[], object], *, fault: Fault | None = None, n: int = 0) -> Ended:
        """Run a function in a child process, in which the n-th operation fails."""
        output, errors = self.folder / "stdout", self.folder / "stderr"
        state = self.state
        state.count, state.first, state.failed = 0, n, b""
        if fault:
            state.error, state.stays, state.operations = fault.error, fault.stays, fault.operations
        child = os.fork()
        if child == 0:
            self._work(act, output, errors, is_armed=fault is not None)
        code, has_children = _wait(child)
        state.armed = 0
        read = {"encoding": "utf-8", "errors": "replace"}
        return Ended(code, output.read_text(**read), errors.read_text(**read), has_children)

    def _work(
        self, act: Callable[[], object], output: Path, errors: Path, *, is_armed: bool
    ) -> None:
        code: Any = 1
        try:
            os.setsid()
            for number, path in ((1, output), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.chdir(self.box)
            self.state.armed = is_armed
            try:
                act()
                code = 0
            except SystemExit as left:
                code = left.code or 0
            # As Python does at the end of a process.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
            code = 70
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def restore(self, template: Path) -> None:
        """Put the files back that the user has before a command."""
        shutil.rmtree(self.box, ignore_errors=True)
        shutil.copytree(template, self.box, symlinks=True)

    def read(self) -> Files:
        """Return the bytes of each file, and of each folder nothing."""
        return {
            str(path.relative_to(self.box)): b"" if path.is_dir() else path.read_bytes()
            for path in sorted(self.box.rglob("*"))
        }

    def try_faults(
        self, command: Command, faults: Sequence[str], numbers: Callable[[int, int], Iterator[int]]
    ) -> Iterator[dict[str, Any]]:
        """Try each fault at each operation; yield the results."""
        template = self.folder / "template"
        shutil.rmtree(template, ignore_errors=True)
        shutil.rmtree(self.box, ignore_errors=True)
        self.box.mkdir()
        (self.box / "tmp").mkdir()
        assert (made := self.call(lambda: command.prepare(self.box))).code == 0, made.errors
        self.box.rename(template)
        self._import_all(command, template)
        before, expected = self._expect(command, template)
        known: set[bytes] = set()
        for name in faults:
            fault, points, found = FAULTS[name], 0, []
            started = time.monotonic()
            for n in numbers(len(name), command.every):
                self.restore(template)
                ended = self.call(command.act, fault=fault, n=n)
                if self.state.count < n:
                    break
                points += 1
                failed = self.state.failed.decode()
                problems = self._judge(command, fault, ended, before, expected)
                state = self._digest(command, expected)
                # A second call after a success may be rejected, because there are results.
                calls_again = ended.code != 0 or command.grows != NOTHING
                # Its result depends only on the files.
                if calls_again and (problems or state not in known):
                    self._age_leftovers()
                    again = self.call(command.act)
                    wrong = self._judge_again(command, again, before, expected)
                    problems += wrong
                    if not wrong:
                        known.add(state)
                if problems:
                    found.append({"n": n, "failed": failed, "problems": problems})
                    _report(command.name, name, found[-1], ended)
            seconds = round(time.monotonic() - started, 1)
            yield {"command": command.name, "fault": name, "points": points,
                   "seconds": seconds, "found": found}  # fmt: skip

    def _import_all(self, command: Command, template: Path) -> None:
        """Run the command here, so that its children import nothing and find warm libraries."""
        self.restore(template)
        os.chdir(self.box)
        kept = [os.dup(1), os.dup(2)]
        try:
            for number in (1, 2):
                os.dup2(os.open(self.folder / "warm", os.O_WRONLY | os.O_CREAT), number)
            with suppress(SystemExit):
                command.act()
        finally:
            os.chdir(self.folder)
            for number, open_file in enumerate(kept, start=1):
                os.dup2(open_file, number)
        gc.collect()
        gc.freeze()

    def _age_leftovers(self) -> None:
        """Let an hour pass, after which temporary files are deleted."""
        for path in self.box.rglob("*.partial"):
            os.utime(path, (0, 0))

    def _expect(self, command: Command, template: Path) -> tuple[Files, Files]:
        """Return the files before and after a command without a fault."""
        results = []
        for _ in range(2):
            self.restore(template)
            before = self.read()
            ended = self.call(command.act)
            assert ended.code == 0, ended.output + ended.errors
            assert not _left(self.read()), _left(self.read())
            results.append(self.read())
        expected, second = results
        self.volatile = {name for name in expected if expected[name] != second.get(name)}
        self.restore(template)
        return before, expected

    def _is_as(self, command: Command, name: str, content: bytes, expected: Files) -> bool:
        """Return whether a file is complete."""
        if name not in self.volatile and not re.match(command.may_differ, name):
            return content == expected[name]
        return _is_whole(name, content)

    def _judge(
        self, command: Command, fault: Fault, ended: Ended, before: Files, expected: Files
    ) -> list[str]:
        """Return what is wrong after a fault."""
        files, problems = self.read(), []
        for name, content in before.items():
            is_own = re.match(command.own, name)
            if name not in files:
                if name in expected and not is_own:
                    problems.append(f"{name} is gone")
            elif files[name] != content and not is_own:
                may_change = name in expected and expected[name] != content
                may_grow = re.match(command.grows, name)
                is_new = name in expected and self._is_as(command, name, files[name], expected)
                if not may_grow and not (may_change and is_new):
                    problems.append(f"{name} was changed")
        for name in files.keys() - before.keys():
            if _left([name]) or re.match(f"{command.own}|{command.grows}", name):
                continue
            if name not in expected:
                problems.append(f"{name} was left")
            elif not self._is_as(command, name, files[name], expected):
                problems.append(f"{name} is half written")
        if ended.stays:
            problems.append("a child process was left")
        if fault.error == KILLED and ended.code == -signal.SIGKILL:
            return problems
        left = [name for name in _left(files) if not self.state.failed.decode().endswith(name)]
        if not fault.blocks_cleaning and left:
            problems.append(f"left: {left}")
        return problems + self._judge_output(command, fault, ended, files, expected)

    def _judge_output(
        self, command: Command, fault: Fault, ended: Ended, files: Files, expected: Files
    ) -> list[str]:
        failed = self.state.failed.decode().partition(" ")[2]
        if ended.code == 0:
            missing = [name for name in expected if name not in files]
            missing = [name for name in missing if not re.match(command.own, name)]
            if missing and "warning" not in ended.errors:
                return [f"success without {missing}"]
            return [] if "Traceback" not in ended.errors else ["a traceback"]
        problems = [] if ended.code in (1, 2, 3, 6) else [f"exit code {ended.code}"]
        if any(words in ended.errors for words in ("Traceback", "unexpected")):
            problems.append("an unexpected error")
        lines = [line for line in ended.errors.splitlines() if line.startswith("error: ")]
        if len(lines) != 1 or "\n  try: " not in ended.errors:
            return [*problems, f"{len(lines)} errors"]
        place = TEMPORARY.sub("", failed)
        # Libraries that are not written in Python report no name, so the folder is named.
        names = {Path(place).name, *(path.name for path in [*Path(place).parents][:2])} - {""}
        # After a fault that stays, the error may be about another file.
        is_other = fault.stays and not re.match("error: (a file|standard output): ", lines[0])
        if not is_other and not any(name in lines[0] for name in names):
            problems.append("the file is not named")
        # These libraries report any error of the disk as damage.
        is_hidden = place.endswith((".xlsx", ".safetensors", ".parquet"))
        if fault.error != KILLED and fault.reason not in lines[0] and not is_hidden:
            problems.append("the cause is not named")
        return problems

    def _judge_again(
        self, command: Command, ended: Ended, before: Files, expected: Files
    ) -> list[str]:
        """Return what is wrong after the same command without a fault."""
        if ended.code or "Traceback" in ended.errors:
            return [f"again: exit code {ended.code}: {ended.errors[-600:]}"]
        files, problems = self.read(), []
        names = {name for name in expected.keys() ^ files.keys() if not re.match(command.own, name)}
        if names:
            problems.append(f"again: other files: {sorted(names)}")
        for name in expected.keys() & files.keys():
            is_as = self._is_as(command, name, files[name], expected)
            if not is_as and not re.match(command.own, name):
                problems.append(f"again: {name} differs")
        if left := _left(files):
            problems.append(f"again: left: {left}")
        return problems

    def _digest(self, command: Command, expected: Files) -> bytes:
        """Return a hash of the files on which the second call depends."""
        digest = hashlib.sha256()
        for name, content in self.read().items():
            plain = TEMPORARY.sub(".partial", name)
            if name in self.volatile:
                content = b"whole" if _is_whole(name, content) else b"half"
            digest.update(plain.encode() + b"\0" + hashlib.sha256(content).digest())
        return digest.digest()


def _left(names: Any) -> list[str]:
    """Return temporary files and locks."""
    return [
        name for name in names
        if ".partial" in name or name.endswith(".lock") or name.startswith("tmp/")
    ]  # fmt: skip


def _is_whole(name: str, content: bytes) -> bool:
    try:
        if name.endswith(".xlsx"):
            return zipfile.is_zipfile(io.BytesIO(content))
        text = content.decode()
        if name.endswith(".jsonl"):
            return all(json.loads(line) for line in text.splitlines()) and text[-1:] in ("\n", "")
        if name.endswith(".json"):
            json.loads(text)
        if name.endswith(".html"):
            return text.rstrip().endswith("</html>")
    except ValueError:
        return not name.endswith((".json", ".jsonl", ".html", ".csv", ".md"))
    return bool(content) or name.endswith(".jsonl")


def _wait(child: int) -> tuple[int, bool]:
    """Return the exit code of a process, and whether it left children, which are killed."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            status = 99 << 8
            break
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(status)
    # Children whose parent ended belong to this process; they get a second to end.
    for _ in range(100):
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return code, False
    for line in os.popen(f"ps -o pid= --ppid {os.getpid()}").read().split():
        try:
            os.kill(int(line), signal.SIGKILL)
        except ProcessLookupError:
            continue
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code, True


def _report(command: str, fault: str, found: dict[str, Any], ended: Ended) -> None:
    problems = "".join(f"    {problem}\n" for problem in found["problems"])
    heading = f"--- {command}: {fault} at {found['n']}: {found['failed']}\n"
    sys.stderr.write(f"{heading}{problems}    exit code {ended.code}: {ended.errors[-1500:]}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("commands", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--faults", nargs="*", default=[*FAULTS])
    parser.add_argument("--part", default="1/1", help="such as 1/2, for one of two processes")
    parser.add_argument("--points", type=int, nargs="*")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    # A shell starts background jobs with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Orphans become children of this process.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    with open(os.environ["FAULTS_STATE"], "r+b") as file:
        shared = mmap.mmap(file.fileno(), ctypes.sizeof(State))
    from faulty_commands import COMMANDS

    gc.collect()
    gc.freeze()
    driver = Driver(options.folder, State.from_buffer(shared))

    def numbers(start: int, every: int) -> Iterator[int]:
        every *= options.every
        return iter(options.points or count(part + (start * 7 % every) * parts, every * parts))

    for name in options.commands or COMMANDS:
        for result in driver.try_faults(COMMANDS[name], options.faults, numbers):
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
