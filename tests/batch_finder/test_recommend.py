from batch_finder.simulated_machines import overflowing, saturating
from hypothesis import given
from hypothesis import strategies as st

from finetune.batch_finder.recommend import fastest_size, promising_size


def test_fastest_size_is_the_smallest_within_3_percent_of_the_best() -> None:
    assert fastest_size({4: 50, 16: 96.9, 32: 97, 64: 100, 128: 99}) == 32


@given(start=st.floats(1e-4, 1), row=st.floats(1e-6, 1), small=st.integers(1, 9))
def test_promising_size_of_a_gpu_is_as_fast_and_hardly_larger_than_need_be(
    start: float, row: float, small: int
) -> None:
    seconds = saturating(start=start, row=row)
    speeds = {size: size / seconds(size) for size in (small, 100_000)}

    size = promising_size(speeds)

    assert small <= size <= 100_000
    assert size / seconds(size) >= 0.97 * max(speeds.values())
    if size > small:
        assert (size - 1) / seconds(size - 1) < 0.981 * max(speeds.values())


def test_promising_size_of_a_cpu_lies_before_its_fastest() -> None:
    seconds = overflowing(start=0.6, row=0.28, best=12)
    speeds = {size: size / seconds(size) for size in (1, 40, 80)}

    assert 1 < promising_size(speeds) <= fastest_size(speeds) == 40


@given(st.dictionaries(st.integers(1, 10**6), st.floats(1e-3, 1e9), min_size=1, max_size=9))
def test_any_speeds_have_a_fastest_and_a_promising_size(speeds: dict[int, float]) -> None:
    assert fastest_size(speeds) in speeds
    assert 1 <= promising_size(speeds) <= fastest_size(speeds)
