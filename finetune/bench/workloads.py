"""Times published networks, and optionally a user's model, on devices."""

import copy
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from finetune.batch_finder.results import Case, architecture_of
from finetune.batch_finder.trial_model import build_trial_model
from finetune.bench import GROUPS, Group, Phase
from finetune.bench.results import ARTICLE_TEXTS, ARTICLE_TOKENS, Row
from finetune.config.modes import Mode
from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.devices.base import Device
from finetune.devices.private import tree_iter, tree_map_only
from finetune.events import Info, emit, muted
from finetune.model.load import load_factory, loss_of, random_classifier
from finetune.model.structure import find_structure, freeze_parameters, set_training
from finetune.model.tensor_store import TensorStore
from finetune.runs.features import with_features
from finetune.tasks.tables import duration
from finetune.tokenization.encode import EncodedTexts, random_texts
from finetune.tokenization.examples import (
    Examples,
    choose_padded_lengths,
    inputs_of_texts,
    plan_epoch,
)
from finetune.training.micro_batches import move_batches

CLASSES = 6
SEED = 0
# Measured with the BERT tokenizer, which may not be available here. It produces 13.4 tokens per
# row for the first thousand TREC rows, 13.0 for the bundled questions.
_CHARACTERS_PER_TOKEN, _SPECIAL_TOKENS = 4.4, 2
MLP_WIDTHS = (1024, 512, 256)
# Width and number of convolutions in each VGG16 block.
_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_PIXELS, _IMAGE_CLASSES = 224, 1000
# An assumption: Apple did not publish its text lengths.
_APPLE_TOKENS = 128
# Published training steps: the network, the mode, tokens and rows.
_TRAINING_STEPS = [
    *(
        ("BERT-base", mode, ARTICLE_TOKENS, rows)
        for mode in ("full", "classifier")
        for rows in (1, 32, 64)
    ),
    ("BERT-base", "full", 128, 64),
    ("BERT-base", "full", ARTICLE_TOKENS, 16),
    ("DistilBERT", "last-1", ARTICLE_TOKENS, 16),
]
_BATCH_SIZE = 32
# If two benches differ only by chance, their ranges of four repeats are disjoint in 3% of cases,
# and their ranges of two repeats in 33%.
MAX_REPEATS = 4

Batch = Mapping[str, Any]
Steps = Mapping[Phase, Callable[[], object]]
"""A training step on rows, or computing their logits without gradients."""
MakeSteps = Callable[[int], Steps]
"""Prepares N rows and returns the steps on them."""


class Limits(NamedTuple):
    """Maximum seconds per step and repeat, and the time after which workloads aren't repeated.

    Steps that take longer get fewer rows.
    """

    step_seconds: float
    repeat_seconds: float
    total_seconds: float


FULL = Limits(step_seconds=7.0, repeat_seconds=1.5, total_seconds=420.0)
QUICK = Limits(step_seconds=0.3, repeat_seconds=0.3, total_seconds=45.0)


class Workload(NamedTuple):
    """A network with data, for timing devices.

    If a step takes too long or too much memory, fewer rows are timed, but at least ``min_rows``.
    """

    group: str
    name: str
    build: Callable[[Device], MakeSteps]
    rows: int
    min_rows: int = 1
    phases: tuple[Phase, ...] = ("training", "evaluation")

    def row(self, phase: Phase, device: str) -> Row:
        """Return the row of a phase, without timings."""
        return Row(group=self.group, workload=self.name, phase=phase, device=device, rows=self.rows)


def list_workloads(
    groups: Sequence[Group], *, model: str | None, lengths: Sequence[int], is_quick: bool
) -> list[Workload]:
    """List the workloads of groups, then the user's ``model``. ``lengths`` are text lengths."""
    published = chain(_small_workloads(lengths, is_quick), _training_workloads(lengths, is_quick))
    workloads = [workload for workload in published if workload.group in groups]
    if model is not None:
        _, batch = load_factory(model)
        tensors = (part for part in tree_iter(batch) if isinstance(part, torch.Tensor))
        rows = next((len(tensor) for tensor in tensors if tensor.ndim), 1)
        build = build_module(lambda: load_factory(model)[0], lambda _: batch)
        workloads.append(Workload("own", model, build, rows, min_rows=rows))
    return sorted(workloads, key=lambda workload: [*GROUPS, "own"].index(workload.group))


def build_module(
    make: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Callable[[Device], MakeSteps]:
    """Return a function that builds a module. Without an optimizer, steps only get gradients."""

    def build(device: Device) -> MakeSteps:
        module = make().to(device.torch_device)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(trained) if make_optimizer else None

        def make_steps(rows: int) -> Steps:
            device.choose_attention(longest_tokens=None)
            batch = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(device.torch_device), dict(make_batch(rows))
            )

            def train() -> None:
                module.train()
                module.zero_grad(set_to_none=True)
                loss_of(module(**batch)).backward()  # type: ignore[no-untyped-call]
                if optimizer:
                    optimizer.step()

            def evaluate() -> None:
                module.eval()
                with torch.inference_mode():
                    module(**batch)

            return {"training": train, "evaluation": evaluate}

        return make_steps

    return build


def _small_workloads(lengths: Sequence[int], is_quick: bool) -> Iterator[Workload]:
    """Yield the networks of three layers, predictions of BERT-base, and Apple's networks.

    Predictions are for 1, 2, 4, … texts, padded to the longest of them.
    """
    for scale in (1, 4, 16):
        widths = [*(scale * width for width in MLP_WIDTHS), 10]
        build = build_module(partial(make_mlp, widths), partial(_random_batch, "input", widths[0]))
        name = "-".join(map(str, widths))
        yield Workload("mlp", name, build, 1024, phases=("training",))
    build = build_module(bert_base, partial(_text_batch, lengths))
    for rows in (2**power for power in range(5 if is_quick else 9)):
        name = f"batch {rows}"
        yield Workload("inference", name, build, rows, min_rows=rows, phases=("evaluation",))
    image = (3, _PIXELS, _PIXELS)
    networks: list[tuple[str, Callable[[], nn.Module], Callable[[int], Batch], int]] = [
        ("ResNet-50", make_resnet50, partial(_random_batch, "pixel_values", *image), 128),
        ("BERT-base", bert_base, partial(_text_batch, [_APPLE_TOKENS]), 64),
        ("VGG16", make_vgg16, partial(_random_batch, "input", *image), 64),
    ]
    for name, make, make_batch, rows in networks:
        build = build_module(make, make_batch, partial(torch.optim.SGD, lr=1e-3))
        yield Workload("apple", name, build, rows)


def _training_workloads(lengths: Sequence[int], is_quick: bool) -> Iterator[Workload]:
    """Yield training steps as published, and passes over the questions as in a run.

    The published steps pad every row to the same length and run the whole model. A run pads to the
    longest row of a batch, and computes the features of a frozen encoder once.
    """
    for network, mode, tokens, rows in _TRAINING_STEPS:
        if is_quick and rows > 1 and network == "BERT-base":
            continue
        build = build_module(
            partial(_make_published_model, network, Mode(mode)),
            partial(_text_batch, lengths, padded_length=tokens),
            partial(torch.optim.AdamW, lr=5e-5),
        )
        name = f"{mode}, {tokens} tokens, batch {rows}"
        name = name if network == "BERT-base" else f"{network}, {name}"
        yield Workload("training", name, build, rows, phases=("training",))
    for mode in ("full", "classifier"):
        yield Workload(
            "training",
            f"{mode}, as finetune run",
            partial(_build_run, Mode(mode), np.resize(lengths, ARTICLE_TEXTS)),
            ARTICLE_TEXTS,
            min_rows=_BATCH_SIZE,
            phases=("training",),
        )


def make_mlp(widths: Sequence[int]) -> nn.Module:
    """Build linear layers of these widths, with ReLU between them."""
    layers = [[nn.Linear(before, after), nn.ReLU()] for before, after in pairwise(widths)]
    return nn.Sequential(*[*chain.from_iterable(layers)][:-1])


def make_resnet50() -> nn.Module:
    """Build ResNet-50 with the default transformers config."""
    config = ResNetConfig()
    config.num_labels = _IMAGE_CLASSES
    return ResNetForImageClassification(config)


def make_vgg16() -> nn.Module:
    """Build VGG16 without batch normalization."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in _VGG16:
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    side = _PIXELS // 2 ** len(_VGG16)
    for inputs in (channels * side**2, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout()]
    layers.insert(-6, nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(4096, _IMAGE_CLASSES))


def _random_batch(name: str, *shape_and_rows: int) -> Batch:
    """Return random numbers, [rows, ...], with labels for transformers image models."""
    *shape, rows = shape_and_rows
    labels = {"labels": torch.arange(rows) % _IMAGE_CLASSES} if name == "pixel_values" else {}
    return {name: torch.randn(rows, *shape), **labels}


def _text_batch(lengths: Sequence[int], rows: int, *, padded_length: int | None = None) -> Batch:
    """Return texts of random tokens with these lengths, by default padded to the longest."""
    tokens = torch.from_numpy(np.resize(lengths, rows))
    mask = (torch.arange(padded_length or int(tokens.max())) < tokens[:, None]).long()
    token_ids = mask * torch.randint(_random_bert().config.vocab_size, mask.shape)
    labels = torch.arange(rows) % CLASSES
    return {"input_ids": token_ids, "attention_mask": mask, "labels": labels}


def _make_published_model(network: str, mode: Mode) -> nn.Module:
    model = bert_base() if network == "BERT-base" else make_distilbert()
    freeze_parameters(model, find_structure(model), mode=mode)
    return model


def make_distilbert() -> PreTrainedModel:
    """Build DistilBERT-base with the default transformers config."""
    config = DistilBertConfig()
    config.num_labels = CLASSES
    return DistilBertForSequenceClassification(config)


def _build_run(mode: Mode, lengths: np.ndarray, device: Device) -> MakeSteps:
    """Return a function that prepares a pass over the first rows, as in a run."""
    case = Case(
        device.name,
        architecture_of(_random_bert().config.to_dict()),
        classes=CLASSES,
        mode=mode,
        padded_length=ARTICLE_TOKENS,
        part="whole" if mode == "full" else "features",
    )
    trial = build_trial_model(case, device=device)
    padded_lengths = choose_padded_lengths(lengths, device.shapes)

    def make_steps(rows: int) -> Steps:
        device.choose_attention(longest_tokens=padded_lengths[-1])
        inputs = inputs_of_texts(
            texts_of_lengths(lengths[:rows]), takes_4d_mask=trial.takes_4d_mask
        )
        labels, weights = np.arange(rows) % CLASSES, np.ones(rows, np.float32)

        def train() -> None:
            examples = Examples(inputs.inputs_of, inputs.lengths, labels, weights)
            if trial.frozen_layers:
                with tempfile.TemporaryDirectory() as folder:
                    store = TensorStore(Path(folder), limit_bytes=2**30)
                    examples = with_features(
                        examples, trial.frozen_layers, store,
                        padded_lengths=padded_lengths, batch_size=64, split="train",
                    )  # fmt: skip
            batches = plan_epoch(
                examples.lengths, effective_batch_size=_BATCH_SIZE,
                padded_lengths=padded_lengths, seed=SEED, epoch=0,
            )  # fmt: skip
            set_training(trial.trainer.model)
            for _, cut in move_batches(examples, batches, device=device):
                trial.trainer.take_step(0, cut(_BATCH_SIZE))

        return {"training": train}

    return make_steps


def read_lengths(data_dir: Path | None) -> list[int]:
    """Estimate the tokens of each TREC training row or each bundled question."""
    data = DataConfig("trec", data_dir=str(data_dir)) if data_dir else DataConfig("questions")
    with muted():
        texts = load_data(data).splits["train"]["text"].to_pylist()
    return [_SPECIAL_TOKENS + round(len(text) / _CHARACTERS_PER_TOKEN) for text in texts]


def bert_base() -> PreTrainedModel:
    """Build a BERT-base for six classes on the CPU, always with the same weights."""
    return copy.deepcopy(_random_bert())


@cache
def _random_bert() -> PreTrainedModel:
    return random_classifier("bert-base-uncased", classes=CLASSES, seed=SEED)


def texts_of_lengths(lengths: Sequence[int] | NDArray[np.int64]) -> EncodedTexts:
    """Generate texts of random BERT tokens with these lengths."""
    size = _random_bert().config.vocab_size
    return random_texts(
        np.asarray(lengths, np.int64), vocabulary_size=size, padding_id=0, seed=SEED
    )


def measure(
    workloads: Sequence[Workload], devices: Sequence[Device], limits: Limits
) -> Iterator[list[Row]]:
    """Yield all rows so far after each workload on each device. Repeat while time is left."""
    for device in devices:
        # Steps that don't fit should fail instead of making the machine swap.
        device.memory.set_memory_limit(device.memory.budget_bytes(None))
    pairs, started = list(product(workloads, devices)), time.time()
    until = started + limits.total_seconds
    timed: list[list[Row]] = []
    seconds = [0.0] * len(pairs)
    for repeat, (number, (workload, device)) in product(range(MAX_REPEATS), enumerate(pairs)):
        now = time.time()
        if not repeat:
            timed.append([workload.row(phase, device.name) for phase in workload.phases])
            left = max((now - started) / max(1, number) * (len(pairs) - number), until - now)
            progress = f"{number + 1}/{len(pairs)}, about {duration(left)} left:"
        elif now + seconds[number] > until or not all(row.seconds for row in timed[number]):
            continue
        else:
            progress = "again, while time is left:"
        emit(Info(f"{progress} {workload.group}: {workload.name}, {device.name}"))
        timed[number] = time_workload(workload, device, limits, rows=timed[number])
        seconds[number] = time.time() - now
        yield list(chain.from_iterable(timed))


def time_workload(
    workload: Workload, device: Device, limits: Limits, *, rows: Sequence[Row]
) -> list[Row]:
    """Return the rows, one per phase, with more timings or a note about the failure."""
    timed: list[Row] = []
    make_steps: MakeSteps | None = None
    for row in rows:
        try:
            torch.manual_seed(SEED)
            make_steps = make_steps or workload.build(device)
            timed.append(_time_steps(row, device, make_steps, limits, min_rows=workload.min_rows))
        # PyTorch, a model or a device can raise any exception.
        except Exception as error:
            reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            timed.append(row.with_note(reason))
    make_steps = None
    gc.collect()
    device.memory.release()
    return timed


def _time_steps(
    row: Row, device: Device, make_steps: MakeSteps, limits: Limits, *, min_rows: int
) -> Row:
    """Time steps on as many rows as before, or as time and memory allow. Return the row."""
    rows = row.timed_rows or row.rows
    if not row.timed_rows and min_rows < rows:
        step = make_steps(min_rows)[row.phase]
        step()
        fitting = int(min_rows * limits.step_seconds / device.time_calls(step, calls=1))
        if fitting < rows:
            row = row.with_note(f"{rows:,} rows per step would take too long")
        rows = max(min_rows, min(rows, fitting))
    while True:
        try:
            step = make_steps(rows)[row.phase]
            step()
            break
        except (RuntimeError, MemoryError) as error:
            if row.timed_rows or rows <= min_rows or not device.memory.is_out_of_memory(error):
                raise
        # Not in the except block, which keeps the tensors of the failed step alive.
        device.memory.release()
        row = row.with_note(f"out of memory with {rows:,} rows per step")
        rows = max(min_rows, rows // 2)
    seconds = device.time_calls(step, calls=1)
    calls = math.ceil(limits.repeat_seconds / 3 / seconds)
    timings = [device.time_calls(step, calls=calls) / calls for _ in range(3 if calls > 1 else 0)]
    return replace(row, timed_rows=rows, seconds=[*row.seconds, *(timings or [seconds])])
