"""Compares ``finetune run`` with ``transformers.Trainer`` on the same rows, model and options.

Each side runs in a separate process, alternately, on CPU or CUDA. Each repeat holds out another
tenth of train_5500 for testing, and uses another seed. The Trainer trains the same layers, with
its frozen layers in training mode, which is its default. With ``--whole-command``, both sides also
validate after each epoch; the Trainer and ``ours-each-epoch`` save after each epoch, and ``ours``
saves as by default.

    python comparisons/against_trainer.py --data-dir FOLDER --device cpu --rows 640 --modes full

Speeds measure only the training. Wall times measure the whole process, from imports to the scores
of the test split. The last line is JSON, with medians of times and means of losses and accuracies.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared import lower_95, measure_process

SIDES = ("ours", "ours-each-epoch", "trainer", "trainer-compiled")
MODES = ("full", "last-2", "lora", "head")
WARMUP_FRACTION, WEIGHT_DECAY, MAX_TOKENS, CLASSES, RANK = 0.1, 0.01, 128, 6, 8


@dataclass(frozen=True)
class Recipe:
    """What both sides train; ``rate`` has the peak learning rates of head and encoder."""

    data_dir: str
    model: str
    device: str
    precision: str
    mode: str
    rows: int | None
    batch_size: int
    epochs: float
    rate: float
    seed: int
    whole_command: bool


def train_with_finetune(recipe: Recipe, folder: Path, *, side: str) -> dict[str, float]:
    """Run the command; return its results."""
    flags = {
        "data": "trec",
        "data-dir": recipe.data_dir,
        "model": recipe.model,
        "device": recipe.device,
        "precision": recipe.precision,
        "max-train-samples": recipe.rows,
        "max-length": MAX_TOKENS,
        "batch-size": recipe.batch_size,
        "num-train-epochs": recipe.epochs,
        "learning-rate": recipe.rate,
        "head-lr-multiplier": 1,
        "warmup-fraction": WARMUP_FRACTION,
        "weight-decay": WEIGHT_DECAY,
        "early-stopping-patience": 0,
        "seed": recipe.seed,
        "split-seed": recipe.seed,
        "output-dir": folder / "run",
        "cache-dir": folder / "cache",
    }
    if side == "ours-each-epoch":
        flags["save-strategy"] = "epoch"
    if not recipe.whole_command:
        flags |= {"save-strategy": "no", "validation-fraction": 0}
    mode = {
        "full": [],
        "last-2": ["--train-layers", "2"],
        "lora": ["--lora-rank", str(RANK), "--contrastive", "off"],
        "head": ["--freeze-core"],
    }[recipe.mode]
    options = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    command = ["-m", "finetune", "run", *options, *mode]
    return measure_side(command, folder / "run" / "all_results.json")


def train_with_trainer(recipe: Recipe, folder: Path, *, side: str) -> dict[str, float]:
    """Start this script again for one side; return its results."""
    file = folder / "trainer.json"
    task = json.dumps({"recipe": asdict(recipe), "side": side, "file": str(file)})
    return measure_side([__file__, "--task", task], file)


def measure_side(arguments: list[str], results_file: Path) -> dict[str, float]:
    """Run Python with these arguments; return its results, with time and memory of its process."""
    measured = measure_process(arguments)
    results = json.loads(results_file.read_text())
    stages = results.get("stage_seconds", {})
    return {
        "examples_per_second": results["train_samples_per_second"],
        "training_seconds": results["train_runtime"],
        "wall_seconds": measured.wall_seconds,
        "peak_resident_gib": measured.peak_bytes / 2**30,
        "train_loss": results["train_loss"],
        "test_loss": results["test_loss"],
        "test_accuracy": results["test_accuracy"],
        **{f"{stage.replace(' ', '_')}_seconds": seconds for stage, seconds in stages.items()},
    }


def run_trainer(recipe: Recipe, *, side: str, file: Path) -> None:
    """Train with the Trainer in this process, and write its metrics."""
    import numpy as np
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from finetune.config.modes import Mode
    from finetune.model.structure import find_structure, freeze_parameters

    set_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    # Without a dtype, transformers would train in the dtype of the saved weights, such as fp16.
    model = AutoModelForSequenceClassification.from_pretrained(
        recipe.model, num_labels=CLASSES, dtype=torch.float32
    )
    if recipe.mode == "lora":
        from peft import LoraConfig, get_peft_model

        linear = [
            name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
        ]
        targets = [name for name in linear if ".layer." in name]
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="SEQ_CLS")
        model = get_peft_model(model, lora)
    else:
        freeze_parameters(model, find_structure(model), mode=Mode(recipe.mode))
    encoded = {
        split: rows.map(
            lambda batch: tokenizer(batch["text"], truncation=True, max_length=MAX_TOKENS),
            batched=True,
            remove_columns=["text"],
        )
        for split, rows in load_rows(recipe).items()
    }
    frequency = "epoch" if recipe.whole_command else "no"
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(file.parent / "trainer"),
            num_train_epochs=recipe.epochs,
            per_device_train_batch_size=recipe.batch_size,
            per_device_eval_batch_size=64,
            learning_rate=recipe.rate,
            # Values below 1 are a fraction of the steps.
            warmup_steps=WARMUP_FRACTION,
            weight_decay=WEIGHT_DECAY,
            seed=recipe.seed,
            bf16=recipe.precision == "bf16",
            fp16=recipe.precision == "fp16",
            torch_compile=side == "trainer-compiled",
            eval_strategy=frequency,
            save_strategy=frequency,
            load_best_model_at_end=recipe.whole_command,
            report_to="none",
            disable_tqdm=True,
            use_cpu=recipe.device == "cpu",
        ),
        train_dataset=encoded["train"],
        eval_dataset=encoded["validation"] if recipe.whole_command else None,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda answers: {
            "accuracy": float(np.mean(np.argmax(answers.predictions, -1) == answers.label_ids))
        },
    )
    trained = trainer.train()
    metrics = {**trained.metrics, **(trainer.predict(encoded["test"]).metrics or {})}
    file.write_text(json.dumps(metrics))


def load_rows(recipe: Recipe) -> Mapping[str, Any]:
    """Return the rows that ``finetune run`` trains and tests on."""
    from datasets import Dataset

    from finetune.config.load import load_config
    from finetune.data.load import load_splits

    options = {
        "data": "trec",
        "data_dir": recipe.data_dir,
        "max_train_samples": recipe.rows,
        "split_seed": recipe.seed,
        "validation_fraction": None if recipe.whole_command else 0.0,
    }
    flags = {name: value for name, value in options.items() if value is not None}
    loaded = load_config(file=None, environment={}, flags=flags, assignments=())
    splits = load_splits(loaded.config.data).splits
    return {split: Dataset(rows) for split, rows in splits.items()}


def save_bert_base(folder: Path, *, tokenizer_folder: Path) -> Path:
    """Write BERT-base with random weights, and another model's tokenizer with its vocabulary."""
    from transformers import AutoTokenizer, BertConfig, BertModel, set_seed

    set_seed(0)
    BertModel(BertConfig()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def train(recipe: Recipe, *, side: str) -> dict[str, float]:
    """Train with one side, in a new run folder."""
    with tempfile.TemporaryDirectory() as folder:
        if side.startswith("trainer"):
            return train_with_trainer(recipe, Path(folder), side=side)
        return train_with_finetune(recipe, Path(folder), side=side)


def summarize(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return medians and means of a mode by side, and our ratio to each Trainer result."""
    middle = {
        side: {
            name: (statistics.median if "_per_" in name or "seconds" in name else statistics.mean)(
                [results[side][name] for results in rounds]
            )
            for name in rounds[0][side]
        }
        for side in rounds[0]
    }
    return {"sides": middle, "ratios": _ratios(rounds) if "ours" in middle else {}}


def _ratios(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return medians of the ratios within a round, and the lower 95% bounds of the accuracies."""
    ratios = {}
    for side in (name for name in rounds[0] if name.startswith("trainer")):
        pairs = [(results["ours"], results[side]) for results in rounds]
        ratios[side] = {
            "speed": statistics.median(
                ours["examples_per_second"] / theirs["examples_per_second"]
                for ours, theirs in pairs
            ),
            "wall": statistics.median(
                theirs["wall_seconds"] / ours["wall_seconds"] for ours, theirs in pairs
            ),
            "accuracy_difference_lower_95": lower_95(
                [ours["test_accuracy"] - theirs["test_accuracy"] for ours, theirs in pairs]
            ),
        }
    return ratios


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--data-dir", help="the folder of train_5500.label")
    parser.add_argument("--model", default="minilm", help="minilm, or a folder with a model")
    parser.add_argument(
        "--weights",
        choices=("bert-base", "own"),
        default="bert-base",
        help="bert-base: BERT-base from its config, with the tokenizer of --model",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=("ours", "trainer"))
    parser.add_argument("--rows", type=int, help="default: all")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--whole-command", action="store_true", help="validate and save each epoch")
    return parser.parse_args()


def main() -> None:
    """Run the sides alternately; print each result, and a summary at the end."""
    arguments = parse_arguments()
    if arguments.task:
        task = json.loads(arguments.task)
        run_trainer(Recipe(**task["recipe"]), side=task["side"], file=Path(task["file"]))
        return
    from finetune.model.source import find_model

    with tempfile.TemporaryDirectory() as name:
        model = find_model(arguments.model, revision=None).folder
        if arguments.weights == "bert-base":
            model = save_bert_base(Path(name) / "bert-base", tokenizer_folder=model)
        rounds: dict[str, list[dict[str, dict[str, float]]]] = {
            mode: [] for mode in arguments.modes
        }
        for seed in range(arguments.repeats):
            for mode in arguments.modes:
                recipe = Recipe(
                    data_dir=arguments.data_dir,
                    model=str(model),
                    device=arguments.device,
                    precision=arguments.precision,
                    mode=mode,
                    rows=arguments.rows,
                    batch_size=arguments.batch_size,
                    epochs=arguments.epochs,
                    rate=arguments.rate,
                    seed=seed,
                    whole_command=arguments.whole_command,
                )
                rounds.setdefault(mode, []).append({})
                for side in arguments.sides:
                    measured = train(recipe, side=side)
                    rounds[mode][-1][side] = measured
                    shown = {key: round(value, 4) for key, value in measured.items()}
                    print(f"seed {seed}, {mode}, {side}: {shown}", flush=True)
    settings = {key: value for key, value in vars(arguments).items() if key != "task"}
    summary = {mode: summarize(results) for mode, results in rounds.items()}
    print(json.dumps({**settings, "modes": summary}))


if __name__ == "__main__":
    main()
