"""The simulated Mac keeps the rules that real ones were seen to follow."""

import pytest
from batch_finder.simulated_machines import GIB, UnifiedMemoryMac

from finetune.devices.mps.memory import MpsMemory


def test_mac_with_8_gb_raises_at_what_pytorch_reports_as_allowed() -> None:
    with pytest.raises(RuntimeError, match=r"max allowed: 9\.07 GB") as caught:
        UnifiedMemoryMac().update(10_000, 128)

    assert MpsMemory().is_out_of_memory(caught.value)


def test_mac_swaps_long_before_it_raises() -> None:
    mac = UnifiedMemoryMac()

    calm, crawling = mac.probe(60), mac.probe(100)

    assert (calm.verdict, calm.is_strained) == ("fits", False)
    assert (crawling.verdict, crawling.is_strained) == ("fits", True)
    assert crawling.seconds / 100 > 5 * calm.seconds / 60
    assert mac.probe(140).verdict == "too_big"


def test_memory_of_the_driver_grows_with_the_shapes_while_tensors_do_not() -> None:
    mac = UnifiedMemoryMac(physical_bytes=64 * GIB, recommended_share=0.78)
    live_bytes = mac.live_bytes
    driver_bytes, swap_bytes, seconds = [], [], []

    for number in range(40):
        seconds.append(mac.update(100 + number, 128))
        driver_bytes.append(mac.driver_bytes)
        swap_bytes.append(mac.swap_bytes)

    assert mac.live_bytes == live_bytes
    assert len(mac.shapes_seen) == 40
    assert max(driver_bytes) > 30 * live_bytes
    assert max(swap_bytes) > 0
    assert max(seconds) > 8 * seconds[0]


def test_one_shape_costs_memory_once() -> None:
    mac = UnifiedMemoryMac()
    mac.update(32, 128)
    driver_bytes = mac.driver_bytes

    mac.update(32, 128)

    assert mac.driver_bytes == driver_bytes


def test_emptying_the_cache_after_each_update_cures_it() -> None:
    mac = UnifiedMemoryMac(physical_bytes=64 * GIB, recommended_share=0.78)

    for number in range(40):
        mac.update(100 + number, 128)
        mac.empty_cache()

    assert mac.swap_bytes == 0
    assert mac.driver_bytes < 2 * mac.live_bytes
