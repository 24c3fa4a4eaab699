"""Times whole commands in PyTorch, onnxruntime and a transformers pipeline, in turn.

    finetune export onnx RUN --verify --int8
    python comparisons/runtimes.py RUN questions.txt --rounds 3

RUN is in fp32, and the file has one text per line.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNTIMES = ("torch", "onnx", "onnx-int8")
PIPELINE = """
import sys
from transformers import pipeline
classify = pipeline("text-classification", model=sys.argv[1], truncation=True, device="cpu")
texts = open(sys.argv[2], encoding="utf-8").read().splitlines()
labels = classify(texts, batch_size=32)
open(sys.argv[3], "w").write("\\n".join(label["label"] for label in labels))
"""


def main() -> None:
    """Print the seconds of each side, and how many times as fast as the pipeline it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    run, file = str(options.run), str(options.file)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: [
                *(sys.executable, "-m", "finetune", "predict", run, "--data", file, "--lines"),
                *("--runtime", name, "--device", "cpu", "-q", "--output", f"{folder}/{name}.csv"),
            ]
            for name in RUNTIMES
        }
        model, labels = str(options.run / "model"), f"{folder}/labels"
        sides["pipeline"] = [sys.executable, "-c", PIPELINE, model, file, labels]
        for number in range(options.rounds):
            for name, command in sides.items():
                more = ["--overwrite"] if number and name != "pipeline" else []
                start = time.perf_counter()
                environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
                subprocess.run([*command, *more], check=True, env=environment)
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    for name, measured in seconds.items():
        ratios = map(float.__truediv__, seconds["pipeline"], measured)
        shown = ", ".join(f"{value:.1f}" for value in measured)
        print(f"{name}: {shown} s; {statistics.median(ratios):.2f} times as fast as the pipeline")


if __name__ == "__main__":
    main()
