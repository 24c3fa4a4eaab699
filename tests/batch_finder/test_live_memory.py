from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.batch_finder.live_memory import LiveMemory

KIB = 1024


def peak_live_bytes(action: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were alive at once, of those that an action made."""
    memory = LiveMemory()
    with memory:
        action()
    return memory.peak_bytes


def kibibyte() -> torch.Tensor:
    return torch.empty(KIB, dtype=torch.uint8)


def test_the_peak_counts_what_is_alive_at_the_same_time() -> None:
    def use_two_at_a_time() -> None:
        for _ in range(5):
            one, other = kibibyte(), kibibyte()
            del one, other

    assert peak_live_bytes(use_two_at_a_time) == 2 * KIB


def test_a_view_takes_no_memory_and_keeps_what_it_looks_at() -> None:
    with LiveMemory() as memory:
        view = kibibyte().view(2, 512)[1]
        assert memory.live_bytes == memory.peak_bytes == KIB
        del view
        assert memory.live_bytes == 0


def test_what_the_backward_pass_needs_stays_alive_until_then() -> None:
    with LiveMemory() as memory:
        weight = torch.ones(256, requires_grad=True)
        loss = (weight * weight.detach().exp()).sum()
        kept_bytes = memory.live_bytes
        loss.backward()
        assert kept_bytes == 2 * KIB + 4
        # Weight, gradient and loss: the factor that the graph kept is gone.
        assert memory.live_bytes == 2 * KIB + 4


def test_the_peak_can_be_counted_anew() -> None:
    with LiveMemory() as memory:
        first = kibibyte()
        second = kibibyte()
        del second
        memory.reset_peak()
        assert memory.peak_bytes == KIB
        del first


def test_an_operation_in_place_takes_nothing() -> None:
    assert peak_live_bytes(lambda: kibibyte().add_(1).mul_(2)) == KIB


def test_fake_tensors_count_as_much_as_they_would_be_and_take_nothing() -> None:
    with FakeTensorMode():
        assert peak_live_bytes(lambda: torch.zeros(2**40, dtype=torch.uint8).mul_(2)) == 2**40
