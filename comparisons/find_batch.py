"""Batch sizes that are found beside the true ones, a full sweep and other finders' answers.

    python comparisons/find_batch.py DEVICE --cells 0-7 --truth 2 --sweep 1 --others 2 --train 4

Each cell is a model, what trains of it, a length, a precision and a cap on memory; features are
not stored. ``--truth``, ``--sweep``, ``--others`` and ``--train`` are for so many of the
cells, from the first. The truth is the largest size that passes in three fresh processes while the
next fails in at least two of three, under the same cap, looked for between what our search saw
fit and fail: where memory is not monotone, a size far above may fit as well, and the others' shares
show it. Accelerate's finder and Lightning's ``binsearch`` search under that cap too, three steps
a probe, each in a process whose start does not count. The recommended size trains in a fresh
process, at the greatest length and at other ones in turn. The extra ``comparisons`` brings
Lightning. The last line is JSON.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils import find_executable_batch_size

from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.child import end_with_parent
from finetune.batch_finder.estimate import load_calibration, model_live_memory
from finetune.batch_finder.find import Bounds, Finder
from finetune.batch_finder.prober import Prober
from finetune.batch_finder.search import Found
from finetune.batch_finder.trial import Trial, build_trial
from finetune.devices.base import Device, gibibytes
from finetune.devices.select import select_device
from finetune.errors import FinetuneError
from finetune.model.mode import Mode
from finetune.model.shape import load_shape
from finetune.tokenization.buckets import choose_padded_lengths


@dataclass(frozen=True)
class Plan:
    """What is compared on a device.

    Args:
        cells: As ``MODEL/MODE/TOKENS/PRECISION/CAP``, the cap in GiB or none.
        limit: Largest size of interest.
        start: Where Accelerate's finder begins.
        steps: How many the recommended size is trained for.
    """

    cells: tuple[str, ...]
    limit: int
    start: int
    steps: int


PLANS = {
    # Where fp32 has to run through frozen layers, the cap is small: a full GPU takes half a minute.
    "cuda": Plan(
        cells=(
            "bert-base-uncased/full/128/fp32/80",
            "bert-base-uncased/full/128/bf16/none",
            "bert-base-uncased/head/128/fp32/8",
            "bert-base-uncased/head/128/bf16/24",
            "bert-base-uncased/full/512/fp32/80",
            "bert-base-uncased/full/512/bf16/none",
            "bert-base-uncased/head/512/fp32/24",
            "bert-base-uncased/head/512/bf16/80",
            "bert-large-uncased/full/128/fp32/8",
            "bert-large-uncased/full/128/bf16/none",
            "bert-large-uncased/head/128/fp32/8",
            "bert-large-uncased/head/128/bf16/24",
            "bert-large-uncased/full/512/fp32/80",
            "bert-large-uncased/full/512/bf16/none",
            "bert-large-uncased/head/512/fp32/8",
            "bert-large-uncased/head/512/bf16/24",
        ),
        limit=16384,
        start=4096,
        steps=200,
    ),
    "cpu": Plan(
        cells=(
            "bert-base-uncased/full/64/fp32/3",
            "bert-base-uncased/full/64/fp32/6",
            "bert-base-uncased/full/128/fp32/3",
            "bert-base-uncased/full/128/fp32/6",
            "minilm/full/64/fp32/2",
            "minilm/full/128/fp32/2",
            "minilm/head/64/fp32/2",
            "minilm/head/128/fp32/2",
        ),
        limit=2048,
        start=1024,
        steps=50,
    ),
}
SEARCH_SECONDS = 480.0
JOB_SECONDS = 600.0
UPDATES_A_PROBE = 3
# Each size of the sweep over the one before it.
SWEEP_FACTOR = 2**0.5


@dataclass(frozen=True)
class Job:
    """What a child process of this script does.

    Args:
        name: One of ``JOBS``.
        case: As ``Case.to_json`` writes it.
        budget_bytes: The cap.
        batch_size: Where it begins, or what it trains with.
        most: Largest size of interest, or how many steps it takes.
    """

    name: str
    case: str
    budget_bytes: int
    batch_size: int
    most: int


def main() -> None:
    """Run the cells that are asked for and print a line each, then all of them as JSON."""
    arguments = read_arguments()
    plan = PLANS[arguments.device]
    device = select_device(arguments.device, emit=lambda _: None)
    first, _, last = arguments.cells.partition("-")
    cells = []
    for place, number in enumerate(range(int(first), int(last or first) + 1)):
        chosen = {
            name: place < getattr(arguments, name) for name in ("truth", "sweep", "others", "train")
        }
        name = plan.cells[number]
        if arguments.cap:
            name = f"{name.rpartition('/')[0]}/{arguments.cap}"
        cell = compare(name, device=device, plan=plan, chosen=chosen)
        cells.append(cell)
        print(f"{number:2} {describe(cell)}", flush=True)
    print(json.dumps({"device": device.description, **summarize(cells), "cells": cells}))


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=PLANS)
    parser.add_argument("--cells", default="0-7", help="numbers of the first and the last cell")
    parser.add_argument("--cap", help="GiB or none, in place of each cell's own")
    for name in ("truth", "sweep", "others", "train"):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="CELLS")
    return parser.parse_args()


def compare(name: str, *, device: Device, plan: Plan, chosen: dict[str, bool]) -> dict[str, Any]:
    """Search one cell's batch sizes, and find out how good they are.

    Args:
        name: The cell, as in ``Plan.cells``.
        device: Where.
        plan: The device's.
        chosen: Which of truth, sweep, others and train are wanted.
    """
    case, cap_bytes = read_cell(name, device=device)
    available_bytes = device.memory.budget_bytes(None)
    started = time.perf_counter()
    try:
        found = search(case, device=device, cap_bytes=cap_bytes, limit=plan.limit)
    except FinetuneError as error:
        return {"cell": name, "failure": error.message}
    cell = {
        "cell": name,
        "seconds": time.perf_counter() - started,
        **describe_search(found),
        "estimate_ratio": estimate_ratio(case, found),
    }
    whole_cap_bytes = cap_bytes or found.budget_bytes
    job = functools.partial(Job, case=case.to_json(), budget_bytes=whole_cap_bytes)
    with Prober(
        case,
        device=device,
        # What a device keeps back of a limit comes on top: the truth may use all of the cap.
        limit_bytes=whole_cap_bytes**2 // device.memory.budget_bytes(whole_cap_bytes),
        timeout_seconds=SEARCH_SECONDS,
    ) as prober:
        if chosen["truth"]:
            cell["truth"] = find_truth(prober, found, limit=plan.limit)
            cell["share_of_truth"] = found.max_verified / cell["truth"]
        if chosen["sweep"]:
            speeds = sweep(prober, found)
            cell["sweep"] = speeds
            cell["share_of_best_speed"] = speeds.get(found.fastest, 0) / max(speeds.values())
    if chosen["others"]:
        for finder in ("accelerate", "lightning"):
            result = run_job(job(finder, batch_size=plan.start, most=plan.limit))
            if "result" in result:
                against = cell.get("truth", found.max_verified)
                result["share"] = result["result"] / against
                result["share_of"] = "truth" if "truth" in cell else "our largest"
            cell[finder] = result
    if chosen["train"]:
        cell["trained"] = run_job(job("train", batch_size=found.recommended, most=plan.steps))
    cell["processes_left"] = len(psutil.Process().children(recursive=True))
    if not device.memory.is_shared:
        cell["bytes_left"] = available_bytes - device.memory.budget_bytes(None)
    return cell


def read_cell(name: str, *, device: Device) -> tuple[Case, int | None]:
    """Return a cell's case and its cap in bytes, None for as much as there is."""
    model, mode, tokens, precision, cap = name.split("/")
    architecture = architecture_of(load_shape(model, revision=None).to_dict())
    case = Case(
        device.name,
        architecture,
        6,
        Mode(mode),
        int(tokens),
        precision,
        "adamw",
        gradient_checkpointing=False,
    )
    return case, None if cap == "none" else int(float(cap) * 2**30)


def search(case: Case, *, device: Device, cap_bytes: int | None, limit: int) -> Found:
    """Search as ``finetune find-batch`` does, with nothing cached."""
    bounds = Bounds(
        limit=limit,
        first=None,
        memory_limit_bytes=cap_bytes,
        time_limit_seconds=SEARCH_SECONDS,
    )
    return Finder(device, bounds, cache=None, emit=lambda _: None).find(case)


def describe_search(found: Found) -> dict[str, Any]:
    """Return what was found, and by which probes."""
    return {
        "budget_bytes": found.budget_bytes,
        "max_verified": found.max_verified,
        "first_failed": found.first_failed,
        "predicted_maximum": found.predicted_maximum,
        "recommended": found.recommended,
        "fastest": found.fastest,
        "peak_bytes": found.peak_bytes,
        "failing_probes": sum(one.verdict != "fits" for one in found.probes),
        "probes": [dataclasses.asdict(one) for one in found.probes],
    }


def estimate_ratio(case: Case, found: Found) -> float:
    """Return the estimated peak at the largest size over the measured one."""
    expected = load_calibration(case).apply(model_live_memory(case))
    return expected.peak_bytes(found.max_verified) / (found.peak_bytes or 1)


def find_truth(prober: Prober, found: Found, *, limit: int) -> int:
    """Return the largest size that passes three times afresh while the next fails twice."""

    @functools.cache
    def passes_of_three(size: int) -> int:
        return sum(prober.probe_afresh(size).verdict == "fits" for _ in range(3))

    low = found.max_verified
    failed = [one.batch_size for one in found.probes if one.verdict == "too_big"]
    high = min((size for size in failed if size > low), default=limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if prober.probe_afresh(middle).verdict == "fits":
            low = middle
        else:
            high = middle
    # One probe a size may have been lucky or unlucky.
    while low < limit and passes_of_three(low + 1) >= 2:
        low += 1
    while low > 1 and passes_of_three(low) < 3:
        low -= 1
    return low


def sweep(prober: Prober, found: Found) -> dict[int, float]:
    """Return the examples per second of sizes from 1 to the largest, the fastest among them."""
    largest = found.max_verified
    powers = (round(SWEEP_FACTOR**exponent) for exponent in itertools.count())
    sizes = {*itertools.takewhile(lambda size: size < largest, powers), largest}
    outcomes = [prober.probe(size) for size in sorted(sizes | {found.fastest})]
    return {one.batch_size: one.examples_per_second for one in outcomes if one.examples_per_second}


def run_job(job: Job) -> dict[str, Any]:
    """Do a job in a child process.

    Returns:
        What the job returns, or under ``failure`` how it ended, and the number of probes.
    """
    command = [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=JOB_SECONDS)
    except subprocess.TimeoutExpired as late:
        probes = len((late.stdout or b"").splitlines())
        return {"failure": f"not done after {JOB_SECONDS:g} s", "probes": probes}
    lines = child.stdout.splitlines()
    if child.returncode:
        last_line = (child.stderr.strip().splitlines() or [""])[-1]
        return {"failure": f"exit code {child.returncode}: {last_line}", "probes": len(lines)}
    return {**json.loads(lines[-1]), "probes": len(lines) - 1}


def work(job: Job) -> None:
    """Do a job in this process; print a line a probe, and its result."""
    end_with_parent()
    case = Case.from_json(job.case)
    device = select_device(case.device, emit=lambda _: None)
    device.memory.set_memory_limit(job.budget_bytes)
    trial = build_trial(case, device=device)
    print(json.dumps(JOBS[job.name](trial, job)))


def search_with_accelerate(trial: Trial, job: Job) -> dict[str, Any]:
    """Let Accelerate search downwards from a start."""

    @find_executable_batch_size(starting_batch_size=job.batch_size)  # type: ignore[untyped-decorator]
    def take_steps(batch_size: int) -> int:
        print(batch_size, flush=True)
        trial.begin()
        for _ in range(UPDATES_A_PROBE):
            trial.take_step(batch_size=batch_size)
        trial.device.synchronize()
        return batch_size

    started = time.perf_counter()
    result = take_steps()
    return {"result": result, "seconds": time.perf_counter() - started}


def search_with_lightning(trial: Trial, job: Job) -> dict[str, Any]:
    """Let Lightning double, bisect and take 5 % off."""
    import pytorch_lightning
    from pytorch_lightning.tuner import Tuner

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        """Takes the trial's steps, and beside them one of a number that Lightning may step."""

        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 1
            self.number = torch.nn.Parameter(torch.zeros(()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([self.number], lr=0.1)

        def train_dataloader(self) -> torch.utils.data.DataLoader[int]:
            # With fewer rows than three batches Lightning would take fewer steps.
            rows: Any = range(UPDATES_A_PROBE * (job.most + 1))
            return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)

        def on_train_start(self) -> None:
            print(self.batch_size, flush=True)
            trial.begin()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            trial.take_step(batch_size=len(batch))
            return self.number * 0

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pytorch_lightning.Trainer(
            accelerator=trial.device.name,
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        started = time.perf_counter()
        result = Tuner(trainer).scale_batch_size(
            module, mode="binsearch", steps_per_trial=UPDATES_A_PROBE, max_val=job.most
        )
        seconds = time.perf_counter() - started
    return {"result": result, "seconds": seconds}


def train(trial: Trial, job: Job) -> dict[str, Any]:
    """Train with one size, every other step at the greatest length, and evaluate at the end."""
    device, longest = trial.device, trial.case.padded_length
    lengths = random.Random(0)
    padded_lengths = choose_padded_lengths(np.arange(1, longest + 1), device.shapes)
    trial.begin()
    device.memory.reset_peak()
    for number in range(job.most):
        padded_length = lengths.choice(padded_lengths) if number % 2 else longest
        case = dataclasses.replace(trial.case, padded_length=padded_length)
        dataclasses.replace(trial, case=case).take_step(batch_size=job.batch_size)
    trial.evaluate(batch_size=job.batch_size)
    device.synchronize()
    peak_bytes = device.memory.held_peak_bytes()
    return {
        "batch_size": job.batch_size,
        "steps": job.most,
        "peak_bytes": peak_bytes,
        "is_within_cap": peak_bytes is None or peak_bytes <= job.budget_bytes,
        "retries": device.memory.retried_allocations(),
    }


JOBS: dict[str, Callable[[Trial, Job], dict[str, Any]]] = {
    "accelerate": search_with_accelerate,
    "lightning": search_with_lightning,
    "train": train,
}


def describe(cell: dict[str, Any]) -> str:
    """Return a cell as a line for people."""
    if "failure" in cell:
        return f"{cell['cell']}: {cell['failure']}"
    parts = [
        f"{cell['cell']} (budget {gibibytes(cell['budget_bytes'])}): {cell['max_verified']} fits, "
        f"{cell['first_failed']} does not",
        f"{len(cell['probes'])} probes, {cell['failing_probes']} failing, {cell['seconds']:.0f} s",
        f"recommended {cell['recommended']}, fastest {cell['fastest']}",
        f"peak {gibibytes(cell['peak_bytes'])}, estimated {cell['estimate_ratio']:.2f} of it",
    ]
    if "truth" in cell:
        parts.append(f"truth {cell['truth']}, found {cell['share_of_truth']:.3f} of it")
    if "sweep" in cell:
        parts.append(f"fastest has {cell['share_of_best_speed']:.3f} of the best speed")
    parts += [
        f"{name}: {describe_other(cell[name])}"
        for name in ("accelerate", "lightning")
        if name in cell
    ]
    if "trained" in cell:
        parts.append(f"trained: {describe_training(cell['trained'])}")
    parts.append(f"left: {cell['processes_left']} processes, {cell.get('bytes_left', 0)} bytes")
    return "; ".join(parts)


def describe_other(result: dict[str, Any]) -> str:
    """Return what another finder found, as a line for people."""
    if "failure" in result:
        return f"{result['failure']}, after {result['probes']} probes"
    return (
        f"{result['result']} ({result['share']:.3f} of {result['share_of']}), "
        f"{result['probes']} probes, {result['seconds']:.0f} s"
    )


def describe_training(result: dict[str, Any]) -> str:
    """Return how the recommended size trained, as a line for people."""
    if "failure" in result:
        return str(result["failure"])
    within = "within" if result["is_within_cap"] else "beyond"
    return f"{result['steps']} steps {within} the cap, {result['retries']} retries"


def summarize(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst and the median of what the cells came to; None where nothing was tried."""
    done = [cell for cell in cells if "failure" not in cell]
    probes = [len(cell["probes"]) for cell in done]
    truths = [cell["share_of_truth"] for cell in done if "truth" in cell]
    speeds = [cell["share_of_best_speed"] for cell in done if "sweep" in cell]
    errors = [abs(cell["estimate_ratio"] - 1) for cell in done]
    return {
        "failed_cells": len(cells) - len(done),
        "least_share_of_truth": min(truths, default=None),
        "most_share_of_truth": max(truths, default=None),
        "median_probes": statistics.median(probes) if probes else None,
        "most_probes": max(probes, default=None),
        "most_failing_probes": max((cell["failing_probes"] for cell in done), default=None),
        "most_seconds": max((cell["seconds"] for cell in done), default=None),
        "least_share_of_best_speed": min(speeds, default=None),
        "median_estimate_error": statistics.median(errors) if errors else None,
        "worst_estimate_error": max(errors, default=None),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        work(Job(**json.loads(sys.argv[2])))
    else:
        main()
