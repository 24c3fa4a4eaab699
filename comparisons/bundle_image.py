"""Builds the image of a bundle with Docker, and classifies a text and a file in its container.

    finetune export bundle RUN
    python comparisons/bundle_image.py RUN/bundle

Without a Docker daemon, it runs the steps of the Dockerfile in a new virtual environment, as the
user of the Dockerfile if it is started by root.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

TEXTS = ["Who wrote Faust?", "How far is the moon?"]


def run_steps(bundle: Path, root: Path) -> tuple[list[str], dict[str, Any]]:
    """Run the steps of a Dockerfile; return its command, and how to start it."""
    lines = (bundle / "Dockerfile").read_text(encoding="utf-8").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    folder, user = root, dict[str, str]()
    environment = {"PATH": f"{root}/venv/bin:/usr/bin:/bin"}
    for name, words in steps:
        print(name, words, flush=True)
        if name == "FROM":
            version = "{}.{}".format(*sys.version_info)
            assert words == f"python:{version}-slim", f"needs Python {words}, not {version}"
            venv.create(root / "venv", with_pip=True)
        elif name == "WORKDIR":
            folder = root / words.lstrip("/")
            folder.mkdir()
        elif name == "COPY":
            *options, source, target = words.split()
            owner = dict(re.findall(r"--(\w+)=(\w+)", " ".join(options))).get("chown", "")
            if (bundle / source).is_file():
                shutil.copy(bundle / source, folder / target)
            else:
                shutil.copytree(bundle / source, folder / target, dirs_exist_ok=True)
                folder.chmod(0o755)  # copytree changes it, but Docker does not
            for path in folder.rglob("*") if owner and os.getuid() == 0 else ():
                shutil.chown(path, owner)
        elif name == "RUN":
            subprocess.run(words, shell=True, check=True, cwd=folder, env=environment)
        elif name == "USER":
            user = {"user": words} if os.getuid() == 0 else {}
        elif name == "ENTRYPOINT":
            started = {"cwd": folder, "env": environment, **user}
            program, *arguments = json.loads(words)
            return [f"{root}/venv/bin/{program}", *arguments], started
        else:
            raise NotImplementedError(name)
    raise ValueError("the Dockerfile has no ENTRYPOINT")


def main() -> None:
    """Build the image, and check that a container classifies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    bundle = parser.parse_args().bundle.resolve()
    docker, options = shutil.which("docker") or "docker", dict[str, Any]()
    has_daemon = subprocess.call(f"{docker} info >/dev/null 2>&1", shell=True) == 0
    with tempfile.TemporaryDirectory() as root:
        if has_daemon:
            subprocess.run([docker, "build", "--tag", "finetune-bundle", bundle], check=True)
            start = [docker, "run", "--rm", "-i", "finetune-bundle"]
        else:
            os.chmod(root, 0o755)  # for other users
            start, options = run_steps(bundle, Path(root))
        of_arguments = subprocess.check_output([*start, *TEXTS], text=True, **options)
        lines = "\n".join(TEXTS)
        of_lines = subprocess.check_output([*start, "-"], input=lines, text=True, **options)
        print(of_arguments)
        assert of_arguments.count("\n") == len(TEXTS)
        assert of_lines == of_arguments
    print("built with Docker" if has_daemon else "its steps were run without Docker")


if __name__ == "__main__":
    main()
