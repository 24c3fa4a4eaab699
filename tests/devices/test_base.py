from types import SimpleNamespace

import pytest
import torch

from finetune.devices.base import torch_state_kept


def accelerator(**changes: object) -> SimpleNamespace:
    """Return a stand-in for ``torch.mps`` whose random state is one number."""
    gpu = SimpleNamespace(state=torch.tensor([5]), **changes)
    gpu.get_rng_state = lambda: gpu.state
    gpu.set_rng_state = lambda state: setattr(gpu, "state", state)
    return gpu


@pytest.mark.parametrize(
    ("gpu", "after"),
    [
        (accelerator(), 5),  # torch.mps has no is_initialized
        (accelerator(is_initialized=lambda: True), 5),
        # Reading its state would initialize a GPU that the process doesn't use.
        (accelerator(is_initialized=lambda: False), 6),
    ],
    ids=["mps", "used", "unused"],
)
def test_gpu_random_state_is_restored_if_initialized(
    gpu: SimpleNamespace, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: torch.device("mps"))
    monkeypatch.setattr("torch.get_device_module", lambda _: gpu)
    seed = torch.initial_seed()
    with torch_state_kept():
        torch.manual_seed(seed + 1)
        gpu.state = torch.tensor([6])
    assert gpu.state.item() == after
    # torch.manual_seed also seeds each GPU that is initialized later.
    assert torch.initial_seed() == seed
