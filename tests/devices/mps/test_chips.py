import pytest

from finetune.devices.mps.chips import Mac, find_mac
from finetune.errors import UsageError

GIB = 2**30
# PyTorch's default limit, relative to the memory that Metal recommends.
HIGH_WATERMARK_RATIO = 1.7


@pytest.mark.parametrize(
    ("gibibytes", "max_allowed"),
    # "max allowed" in messages of PyTorch: pytorch#105839, #130112, haoheliu/AudioLDM2#20,
    # instructlab#2568, BoBo0037/bobo-fun#8.
    [(8, 9.07), (16, 18.13), (18, 20.40), (32, 36.27), (64, 81.60)],
)
def test_recommended_memory_is_what_pytorch_computes_its_limit_from(
    gibibytes: int, max_allowed: float
) -> None:
    recommended = Mac("", gibibytes * GIB).recommended_bytes
    assert recommended * HIGH_WATERMARK_RATIO / GIB == pytest.approx(max_allowed, abs=0.005)


def test_macos_leaves_less_of_a_small_mac_than_metal_recommends() -> None:
    small, large = find_mac("m1-8gb"), find_mac("m1-16gb")
    assert small.budget_bytes < small.recommended_bytes
    assert large.budget_bytes == large.recommended_bytes


@pytest.mark.parametrize(
    "name",
    ["m4-max-128gb", "M4 Max 128 GB", "MacBook Pro M4 Max, 128GiB", "128 GB M4Max", "m4_max_128g"],
)
def test_a_mac_is_found_by_its_chip_and_memory(name: str) -> None:
    assert find_mac(name) == Mac("m4-max-128gb", 128 * GIB, "m4-max")


@pytest.mark.parametrize("name", ["", "i9-64gb", "m99", "m18gb", "M2 8", "m2 1.5gb"])
def test_a_name_without_chip_or_memory_is_answered_with_one_that_has_both(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_mac(name)
    assert "m1-8gb" in caught.value.remedy
