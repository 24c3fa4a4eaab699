"""Compares the peak memory of real training with the predicted bytes of live tensors.

    python comparisons/calibrate_memory.py DEVICE [MODEL/MODE/TOKENS/PRECISION/BATCH ...]

/checkpointing may follow the batch.

Each measurement trains in a new process and is printed as a line of JSON. The last line has the
fitted line and its largest error, for the encoder and for the head. On a Mac, these are the numbers
in finetune/batch_finder/estimate.py.
"""

import json
import subprocess
import sys
from typing import Any

import numpy as np
from transformers import BertConfig

from finetune.batch_finder.estimate import allocated_peaks
from finetune.batch_finder.results import Case, architecture_of
from finetune.batch_finder.trial_model import build_trial_model, measure
from finetune.config.modes import Mode
from finetune.devices.host import keep_freed_memory
from finetune.devices.select import select_device

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bert-base": {},
}
PARTS = {"encoder": ("full", "last-2"), "head": ("head", "classifier")}
PLAN = [
    f"{model}/{mode}/{tokens}/fp32/{batch}"
    for model, mode, batches in (
        ("minilm", "full", (32, 64)),
        ("bert-base", "full", (8, 16)),
        ("minilm", "head", (64, 256)),
        ("bert-base", "head", (16, 48)),
    )
    for tokens in (64, 128)
    for batch in batches
]
PLAN += ["minilm/full/64/bf16/32", "bert-base/full/64/fp32/32"]


def main() -> None:
    """Measure each case of the plan for a CPU, or the chosen cases, and fit the calibration."""
    device, *names = sys.argv[1:]
    lines = [measure_alone(device, name) for name in names or PLAN]
    by_part = {
        part: [line for line in lines if line["mode"] in modes] for part, modes in PARTS.items()
    }
    print(json.dumps({part: fit(chosen) for part, chosen in by_part.items() if len(chosen) > 1}))


def measure_alone(device: str, name: str) -> dict[str, Any]:
    """Measure in a new process, predict, and print both."""
    command = [sys.executable, __file__, "--measure", device, name]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    case, batch = read_name(device, name)
    line = {
        "case": name,
        "mode": case.mode,
        "batch": batch,
        **json.loads(answer),
        "predicted_live_bytes": allocated_peaks(case, [batch, batch])[1],
    }
    print(json.dumps(line), flush=True)
    return line


def measure_here(device_name: str, name: str) -> None:
    """Train as trials of the batch finder do, and print the peaks."""
    keep_freed_memory()
    case, batch = read_name(device_name, name)
    device = select_device(device_name)
    trial = build_trial_model(case, device=device)
    measured = measure(trial, batch_size=batch, budget_bytes=device.memory.budget_bytes(None))
    # On the CPU, both are resident memory.
    peaks = {"reserved_bytes": measured.peak_bytes, "allocated_bytes": device.memory.peak_bytes()}
    print(json.dumps(peaks))


def read_name(device: str, name: str) -> tuple[Case, int]:
    """Return the case and the batch size of a name such as ``bert-base/full/128/fp32/8``."""
    model, mode, padded_length, precision, batch, *options = name.split("/")
    architecture = architecture_of(BertConfig(**SHAPES[model]).to_dict())
    case = Case(
        device, architecture, 6, Mode(mode), int(padded_length), precision,
        gradient_checkpointing="checkpointing" in options,
    )  # fmt: skip
    return case, int(batch)


def fit(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Fit ``held = offset + slope * live`` by least squares of the relative errors."""
    live = np.array([line["predicted_live_bytes"] for line in lines], float)
    held = np.array([line["reserved_bytes"] for line in lines], float)
    columns = np.stack([live / held, 1 / held], axis=1)
    (slope, offset), *_ = np.linalg.lstsq(columns, np.ones(len(lines)), rcond=None)
    errors = np.abs(1 - (offset + slope * live) / held)
    return {
        "slope": round(float(slope), 3),
        "offset_bytes": round(float(offset)),
        "median_error": round(float(np.median(errors)), 3),
        "worst_error": round(float(errors.max()), 3),
        "measurements": len(lines),
    }


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure_here(*sys.argv[2:])
    else:
        main()
