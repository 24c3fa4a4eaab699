"""Isolate the tests from this machine, and share one model and one run."""

import atexit
import gc
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import slipcover
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from blocking import Start
    from tiny_runs import Command

# Libraries read these variables on import, so they are set before the test modules are imported.
_home = tempfile.TemporaryDirectory(prefix="finetune-tests-")
atexit.register(_home.cleanup)
for _name in list(os.environ):
    # Variables that the command, the Hub client and Rich read. CI services set `CI`.
    if _name == "CI" or _name.startswith(("FINETUNE_", "HF_", "HUGGING", "FORCE_COLOR", "TTY_")):
        del os.environ[_name]
os.environ |= {
    "COLUMNS": "100",
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens here, so tests can't reach the real Hub
    "HF_HOME": f"{_home.name}/huggingface",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "NO_COLOR": "1",
    # Threads don't speed up tiny models, and slow them down if other programs use the cores.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "XDG_CACHE_HOME": f"{_home.name}/cache",
}

# The time per example depends more on other programs than on the tested code.
settings.register_profile("finetune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("finetune")

# When slipcover removes probes from frequently executed code, it keeps all tensors alive.
slipcover.Slipcover.deinstrument_seen = lambda self: None

# Waiting for the disk would take longer than most tests.
os.fsync = lambda descriptor: None

# Shells start background jobs with Ctrl-C ignored, and nohup ignores SIGHUP. Restore both here and
# in child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, because they are never garbage."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose GPU can't be used, with the reason."""
    required = {"mps", "cuda"} & {marker.name for marker in item.iter_markers()}
    if required:
        from finetune.devices.select import DEVICES

        for name in required:
            if unusable := DEVICES[name].why_not_usable():
                pytest.skip(f"needs a GPU for {name}: {unusable.reason}")


# Fixtures import these modules, so that tests for small packages start in a second.


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small pretrained encoder. Tests don't change it."""
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model_without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pretrained encoder whose results don't depend on the number of processes."""
    from tiny_models import save_tiny_model

    folder = tmp_path_factory.mktemp("models") / "without-dropout"
    return save_tiny_model(folder, hidden_dropout_prob=0, attention_probs_dropout_prob=0)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The folder of a quick, finished run. Tests don't change it."""
    from tiny_runs import run_tiny

    folder = tmp_path_factory.mktemp("runs") / "finished"
    run_tiny(folder, model=tiny_folder)
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> "Command":
    """Return a function that runs the command in this process."""
    from tiny_runs import Outcome

    from finetune.commands.main import main

    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code: Any = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code or 0
        assert isinstance(code, int)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Start]":
    """Return a function that starts a program and kills it at the end of the test."""
    from blocking import end

    started: list[subprocess.Popen[str]] = []

    def start_one(
        *command: str | Path, environment: dict[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        # torchrun leaves folders here.
        variables = {"TMPDIR": str(tmp_path_factory.mktemp("children")), **(environment or {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | variables, **(pipes | options)))
        return started[-1]

    yield start_one
    for process in started:
        end(process)
