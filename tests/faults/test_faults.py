"""Commands in which each file operation fails once. ``make test-faults`` tries all operations."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROCESSES = 2


def try_faults(folder: Path, *arguments: str, part: int) -> list[dict[str, Any]]:
    """Run driver.py with the library that makes operations fail, and return its results."""
    folder = folder / str(part)
    folder.mkdir()
    (folder / "state").write_bytes(bytes(4096))
    library = folder / "faults.so"
    compiler = [
        "gcc",
        "-O2",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(HERE / "faults.c"),
        "-ldl",
    ]
    subprocess.run(compiler, check=True)
    box = folder / "box"
    environment = {
        "LD_PRELOAD": str(library),
        "FAULTS_FOLDER": str(box),
        "FAULTS_STATE": str(folder / "state"),
        "XDG_CACHE_HOME": str(box / "cache"),
        "HF_HOME": str(box / "hf"),
        "TMPDIR": str(box / "tmp"),
        "COLUMNS": "200",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, str(HERE / "driver.py"), str(folder), *arguments]
    command += ["--part", f"{part}/{PROCESSES}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_commands_survive_each_failing_operation(tmp_path: Path) -> None:
    if sys.platform != "linux" or not shutil.which("gcc"):
        pytest.skip("needs Linux and gcc, to preload a library that lets operations fail")
    # All commands, or a sample: every 20th operation of two.
    sample = "predict-csv run --every 20 --faults 'ENOSPC stays' EIO SIGKILL"
    asked = shlex.split(os.environ.get("FAULTS", sample))
    call = partial(try_faults, tmp_path, *asked)
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda part: call(part=part), range(1, PROCESSES + 1))
        results = [result for part in parts for result in part]
    for result in results:
        sys.stdout.write(json.dumps({**result, "found": len(result["found"])}) + "\n")
    assert sum(result["points"] for result in results) > 0
    assert [result for result in results if result["found"]] == []
