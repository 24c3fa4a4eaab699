"""Measures how steps and frozen features scale from one process to two on one host.

The script starts itself through ``torch.distributed.run``. Steps train all layers of BERT-base in
bf16, on texts as long as TREC questions, with ``--rows`` rows per process. Features of the frozen
layers of BERT-base are computed for ``--feature-rows`` rows in total, into an empty store.

    python comparisons/weak_scaling.py --device cuda --rows 32 256 --feature-rows 200000

The last line is JSON: examples per second by processes and rows per process, the speed of two
processes as a fraction of twice the speed of one (weak scaling), and the seconds for the features.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from finetune import distributed
from finetune.bench.workloads import CLASSES, SEED, bert_base, read_lengths, texts_of_lengths
from finetune.config.modes import Mode
from finetune.config.schema import Config, change_options
from finetune.devices.base import BatchSize, Device, move_to_device
from finetune.devices.select import select_device
from finetune.model.features import split_frozen
from finetune.model.structure import find_structure, freeze_parameters, set_training
from finetune.model.tensor_store import TensorStore
from finetune.runs.features import with_features
from finetune.tasks.single import Single
from finetune.tokenization.examples import (
    Examples,
    choose_padded_lengths,
    inputs_of_texts,
    plan_epoch,
)
from finetune.training.micro_batches import move_batches
from finetune.training.plan import Plan
from finetune.training.trainer import Trainer

FEATURES_BATCH_SIZE = 64
STORE_BYTES = 2**40


def make_examples(rows: int, data_dir: Path | None) -> Examples:
    """Return rows of random tokens, as long as the rows of TREC or of the bundled questions."""
    lengths = np.resize(read_lengths(data_dir), rows)
    inputs = inputs_of_texts(
        texts_of_lengths(lengths), takes_4d_mask=find_structure(bert_base()).takes_4d_mask
    )
    labels, weights = np.arange(rows) % CLASSES, np.ones(rows, np.float32)
    return Examples(inputs.inputs_of, inputs.lengths, labels, weights)


def time_steps(device: Device, *, rows: int, steps: int, data_dir: Path | None) -> float:
    """Return examples per second of steps with N rows per process, after captures are done."""
    effective = rows * distributed.world_size()
    examples = make_examples(steps * effective, data_dir)
    padded_lengths = choose_padded_lengths(examples.lengths, device.shapes)
    device.choose_attention(longest_tokens=padded_lengths[-1])
    model = bert_base()
    options = Mode("full").defaults(steps_per_epoch=steps)
    options |= {"learning_rate": 1e-5, "precision": "bf16"}
    trainer = Trainer(
        model,
        Plan(change_options(Config(), options), total_steps=steps),
        task=Single(),
        device=device,
        head=find_structure(model).head,
        batch_size=BatchSize(rows, "batch size", device),
    )
    set_training(trainer.model)
    batches = plan_epoch(
        examples.lengths, effective_batch_size=effective, padded_lengths=padded_lengths, seed=SEED,
        epoch=0,
    )  # fmt: skip
    # The first pass captures each shape.
    seconds = 0.0
    for _ in range(2):
        distributed.barrier()
        started = time.perf_counter()
        moved = move_batches(examples, batches, device=device)
        for number, (_, cut) in enumerate(moved):
            trainer.step(number, cut)
        device.synchronize()
        seconds = time.perf_counter() - started
    if trainer.cuda_graph_error:
        print(f"not captured: {trainer.cuda_graph_error}", file=sys.stderr)
    return len(examples.labels) / seconds


def time_features(device: Device, *, rows: int, data_dir: Path | None) -> float:
    """Return the seconds for the frozen layers' features of this many rows in total."""
    model = bert_base()
    structure = find_structure(model)
    freeze_parameters(model, structure, mode=Mode("head"))
    layers = split_frozen(
        model, device=device, precision="bf16", takes_4d_mask=structure.takes_4d_mask
    )
    assert layers is not None
    move_to_device(model, device.torch_device)
    folder = distributed.broadcast(lambda: tempfile.mkdtemp(prefix="weak-scaling-"))
    seconds = 0.0
    # The first pass, with few rows, is a warm-up.
    for count in (min(rows, 64 * FEATURES_BATCH_SIZE), rows):
        examples = make_examples(count, data_dir)
        padded_lengths = choose_padded_lengths(examples.lengths, device.shapes)
        device.choose_attention(longest_tokens=padded_lengths[-1])
        distributed.barrier()
        started = time.perf_counter()
        with_features(
            examples,
            layers,
            TensorStore(Path(folder) / str(count), limit_bytes=STORE_BYTES),
            padded_lengths=padded_lengths,
            batch_size=FEATURES_BATCH_SIZE,
            split="train",
        )
        seconds = time.perf_counter() - started
    return seconds


@distributed.joined()
def work(arguments: argparse.Namespace) -> None:
    """Measure in one process of a group; the main process prints a line of JSON."""
    device = select_device(arguments.device)
    distributed.use_device(device)
    results = {
        f"steps of {rows} rows": time_steps(
            device, rows=rows, steps=arguments.steps, data_dir=arguments.data_dir
        )
        for rows in arguments.rows
    }
    if arguments.feature_rows:
        results["features"] = time_features(
            device, rows=arguments.feature_rows, data_dir=arguments.data_dir
        )
    if distributed.is_main():
        print(json.dumps(results), flush=True)


def launch(processes: int) -> dict[str, float]:
    """Return what this many processes of this host measure."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={processes}", __file__, "--worker", *sys.argv[1:],
    ]  # fmt: skip
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    print(f"{processes}: {results}", flush=True)
    return results


def main() -> None:
    """Parse the arguments, measure with one process and with two, print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 256], help="rows a process")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--feature-rows", type=int, default=200_000, help="0: no features")
    parser.add_argument("--data-dir", type=Path, help="folder of TREC's raw files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    alone, together = launch(1), launch(2)
    summary = {"device": arguments.device, "1": alone, "2": together}
    names = [name for name in alone if name != "features"]
    summary["efficiency"] = {name: together[name] / (2 * alone[name]) for name in names}
    if "features" in alone:
        summary["speedup of features"] = alone["features"] / together["features"]
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
