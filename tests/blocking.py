"""Child processes that wait at a known point, so that tests don.t depend on timing."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil

Start = Callable[..., "subprocess.Popen[str]"]
FINETUNE = (sys.executable, "-m", "finetune")
STEP = "finetune.training.trainer:Trainer.step"
FEATURES = "finetune.model.features:FrozenLayers.features"
_BLOCKED_CALL = "BLOCKED_CALL_OF_A_TEST"


@dataclass(frozen=True)
class BlockedCall:
    """A call of a function at which a process waits until the test releases it.

    Args:
        folder: An existing folder, only for this call.
        place: The function, such as ``package.module:Class.method``.
        call: The number of the call, from 1.
        rank: The rank of the process that waits, at the first start by a launcher.
    """

    folder: Path
    place: str
    call: int = 1
    rank: int = 0

    def environment(self) -> dict[str, str]:
        """Return the environment of the process and its child processes."""
        # Python imports a module with this name at startup.
        (self.folder / "sitecustomize.py").write_text("import blocking\nblocking.prepare()\n")
        path = [str(self.folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        place = {"place": self.place, "call": self.call, "rank": self.rank}
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            _BLOCKED_CALL: json.dumps({"folder": str(self.folder), **place}),
        }

    def wait(self, process: subprocess.Popen[str]) -> None:
        """Wait until the process reaches the call. Fail if the process exits first."""
        while not (self.folder / "is-reached").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)

    def release(self) -> None:
        """Let the process continue."""
        (self.folder / "is-released").touch()

    def patch(self) -> None:
        """Replace the function in the process that must wait."""
        module, _, names = self.place.partition(":")
        *owners, name = names.split(".")
        owner: Any = importlib.import_module(module)
        for one in owners:
            owner = getattr(owner, one)
        original, calls = getattr(owner, name), count(1)

        def wait_and_call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == self.call:
                (self.folder / "is-reached").touch()
                while not (self.folder / "is-released").exists():
                    time.sleep(0.01)
            return original(*arguments, **options)

        setattr(owner, name, wait_and_call)


def prepare() -> None:
    """Make this process wait, if it is the process to block."""
    fields = json.loads(os.environ[_BLOCKED_CALL])
    blocked = BlockedCall(Path(fields.pop("folder")), **fields)
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_start and int(os.environ.get("RANK", "0")) == blocked.rank:
        blocked.patch()


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all processes that it started, unless it has exited."""
    if process.poll() is None:
        for one in psutil.Process(process.pid).children(recursive=True):
            one.kill()
        process.kill()
        process.communicate()
