"""Shield the tests from the machine they run on, and it from them; share one model and one run."""

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
    from held import Start
    from tiny_runs import Command

# Libraries read these when they are imported, so they are set before any test module is.
_home = tempfile.TemporaryDirectory(prefix="finetune-tests-")
atexit.register(_home.cleanup)
for _name in list(os.environ):
    # What the command, the Hub's client and rich read. CI services set `CI`.
    if _name == "CI" or _name.startswith(("FINETUNE_", "HF_", "HUGGING", "FORCE_COLOR", "TTY_")):
        del os.environ[_name]
os.environ |= {
    "COLUMNS": "100",
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens: no test reaches the real Hub
    "HF_HOME": f"{_home.name}/huggingface",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "NO_COLOR": "1",
    # Tiny models gain nothing from threads, and lose much where other work shares the processors.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "XDG_CACHE_HOME": f"{_home.name}/cache",
}

# How long an example takes says more about the machine's other work than about what is tested.
settings.register_profile("finetune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("finetune")

# Taking the probes out of what has often run, slipcover keeps the tensors of all frames alive.
slipcover.Slipcover.deinstrument_seen = lambda self: None

# No test cuts the power, and waiting for the disk takes longer than most tests compute.
os.fsync = lambda descriptor: None

# A shell starts what runs in the background with Ctrl-C ignored, nohup with what a closing terminal
# sends, here and in child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what imports have made: none of it is ever garbage."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose GPU can't be used here, and say why; a virtual Mac's is only available."""
    asked = {"mps", "cuda"} & {marker.name for marker in item.iter_markers()}
    if asked:
        from finetune.devices.select import DEVICES

        for name in asked:
            if unusable := DEVICES[name].why_not_usable():
                pytest.skip(f"needs a GPU for {name}: {unusable.reason}")


# The imports are in the fixtures, so that a package without them is tested in a second.


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pretrained encoder, as ``save_pretrained`` writes it; tests leave it as it is."""
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model_without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pretrained encoder of which several processes compute what one does."""
    from tiny_models import save_model_without_dropout

    return save_model_without_dropout(tmp_path_factory.mktemp("models") / "without-dropout")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The folder of a quick run that has finished; tests leave it as it is."""
    from tiny_runs import run_tiny

    folder = tmp_path_factory.mktemp("runs") / "finished"
    run_tiny(folder, model=tiny_folder)
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> "Command":
    """Return a function that runs the command within this process, to its end."""
    from tiny_runs import make_command

    return make_command(capsys)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Start]":
    """Return a function that starts a program, which does not outlive the test."""
    from held import end

    started: list[subprocess.Popen[str]] = []

    def start_one(
        *command: str | Path, environment: dict[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        # torchrun leaves its folders there.
        variables = {"TMPDIR": str(tmp_path_factory.mktemp("children")), **(environment or {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | variables, **(pipes | options)))
        return started[-1]

    yield start_one
    for process in started:
        end(process)
