"""Benchmark workloads on the CPU, with a tiny BERT instead of BERT-base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from finetune.bench import workloads
from finetune.bench.results import Row
from finetune.bench.workloads import (
    MLP_WIDTHS,
    Limits,
    Workload,
    bert_base,
    list_workloads,
    make_mlp,
    make_resnet50,
    make_vgg16,
    time_workload,
)
from finetune.devices.cpu import CpuDevice

LENGTHS = [3, 9, 5, 7]
SHORT = Limits(step_seconds=9.0, repeat_seconds=1e-9, total_seconds=0.0)


def workloads_of(*groups: Any, model: str | None = None) -> list[Workload]:
    return list_workloads(groups, model=model, lengths=LENGTHS, is_quick=True)


def timed(workload: Workload) -> list[Row]:
    rows = [workload.row(phase, "cpu") for phase in workload.phases]
    return time_workload(workload, CpuDevice(), SHORT, rows=rows)


@pytest.fixture
def tiny_bert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_random_bert", tiny_model)
    steps = [("BERT-base", "full", 16, 1), ("BERT-base", "classifier", 16, 1)]
    monkeypatch.setattr(workloads, "_TRAINING_STEPS", [*steps, ("DistilBERT", "last-1", 16, 4)])
    monkeypatch.setattr(workloads, "make_distilbert", lambda: tiny_model("distilbert"))
    monkeypatch.setattr(workloads, "ARTICLE_TOKENS", 16)
    monkeypatch.setattr(workloads, "ARTICLE_TEXTS", 40)


@pytest.mark.usefixtures("tiny_bert")
@pytest.mark.parametrize("group", ["inference", "training"])
def test_text_workloads_are_timed_on_the_cpu(group: str) -> None:
    for workload in workloads_of(group):
        [row] = timed(workload)
        assert (row.note, row.timed_rows) == ("", workload.rows), workload.name
        assert all(seconds > 0 for seconds in row.seconds)


@pytest.mark.usefixtures("tiny_bert")
@pytest.mark.parametrize("mode", ["full", "classifier"])
def test_training_workload_updates_only_the_parameters_of_its_mode(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bert_base()
    monkeypatch.setattr(workloads, "bert_base", lambda: model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    workloads_by_name = {workload.name: workload for workload in workloads_of("training")}
    workload = workloads_by_name[f"{mode}, 16 tokens, batch 1"]
    workload.build(CpuDevice())(1)["training"]()
    after = model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert "classifier.weight" in changed
    assert (mode == "full") == ("bert.pooler.dense.weight" in changed)


def test_networks_have_as_many_parameters_as_published() -> None:
    with torch.device("meta"):
        networks = {"ResNet-50": make_resnet50(), "VGG16": make_vgg16()} | {
            f"mlp times {scale}": make_mlp([*(scale * width for width in MLP_WIDTHS), 10])
            for scale in (1, 4, 16)
        }
    counts = {
        name: sum(parameter.numel() for parameter in network.parameters())
        for name, network in networks.items()
    }
    assert counts == {
        "mlp times 1": 658_698,
        "mlp times 4": 10_499_082,
        "mlp times 16": 167_825_418,
        "ResNet-50": 25_557_032,
        "VGG16": 138_357_544,
    }


def test_user_network_is_trained_and_evaluated_with_its_own_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_network.py").write_text(
        "import torch\ndef make(): return torch.nn.Linear(3, 4), {'input': torch.ones(5, 3)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    [workload] = workloads_of(model="own_network:make")
    rows = timed(workload)
    assert [(row.phase, row.timed_rows, row.note) for row in rows] == [
        ("training", 5, ""),
        ("evaluation", 5, ""),
    ]
