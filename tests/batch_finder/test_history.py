import pytest
from batch_finder.simulated_machines import BERT_ON_CPU_MIB, BERT_ON_H200, GIB, Curve
from hypothesis import given
from hypothesis import strategies as st

from finetune.batch_finder.history import fit_memory


def peaks_on(curve: Curve, *sizes: int) -> dict[int, int]:
    return {size: round(curve(size)) for size in sizes}


@pytest.mark.parametrize("sizes", [(4, 26), (16, 64), (300, 800), (1, 2, 4, 38), (1, 38, 500)])
def test_two_points_above_the_floor_predict_the_top_within_1_percent(sizes: tuple[int]) -> None:
    model = fit_memory(peaks_on(BERT_ON_H200, *sizes))

    assert model.peak_bytes(1024) == pytest.approx(BERT_ON_H200(1024), rel=0.01)
    assert model.largest_batch(80 * GIB) == pytest.approx(1615, rel=0.01)


@pytest.mark.parametrize("sizes", [(8, 16), (8, 32), (16, 64), (8, 16, 32), (8, 16, 32, 64)])
def test_noisy_points_of_a_cpu_predict_the_next_within_7_percent(sizes: tuple[int]) -> None:
    model = fit_memory({size: BERT_ON_CPU_MIB[size] for size in sizes})
    next_size = 2 * max(sizes)

    assert model.peak_bytes(next_size) == pytest.approx(BERT_ON_CPU_MIB[next_size], rel=0.075)


@given(
    st.dictionaries(st.integers(1, 10**5), st.integers(1, 2**40), min_size=1, max_size=9),
    st.integers(1, 2**41),
)
def test_any_peaks_give_a_model_that_keeps_its_word(
    peaks: dict[int, int], budget_bytes: int
) -> None:
    model = fit_memory(peaks)
    largest = model.largest_batch(budget_bytes)

    assert model.peak_bytes(10**5) >= model.peak_bytes(1)
    if largest:
        assert model.peak_bytes(largest) <= budget_bytes * (1 + 1e-6)
        assert model.peak_bytes(largest + 2) >= budget_bytes * (1 - 1e-6)
