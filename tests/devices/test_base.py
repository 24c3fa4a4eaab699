from types import SimpleNamespace

import pytest
import torch

from finetune.devices.base import torch_state_kept


def accelerator(**changes: object) -> SimpleNamespace:
    """Return the module of a GPU with a random state of one number, as in ``torch.mps``."""
    gpu = SimpleNamespace(state=torch.tensor([5]), **changes)
    gpu.get_rng_state = lambda: gpu.state
    gpu.set_rng_state = lambda state: setattr(gpu, "state", state)
    return gpu


@pytest.mark.parametrize(
    ("gpu", "after"),
    [
        (accelerator(), 5),  # torch.mps has no is_initialized
        (accelerator(is_initialized=lambda: True), 5),
        # Reading its state would initialize a GPU that the process does not use.
        (accelerator(is_initialized=lambda: False), 6),
    ],
    ids=["mps", "used", "unused"],
)
def test_the_random_state_of_a_gpu_is_kept_if_it_has_one(
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
