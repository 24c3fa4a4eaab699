import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_linear_schedule_with_warmup

from finetune.training.optimizers import Schedule

# Steps of the warm-up and of the run.
runs = st.integers(1, 300).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


def rates_of_transformers(schedule: Schedule) -> list[float]:
    """Return the rates of a scheduler that is asked before each step, and after the last."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=schedule.peak)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, schedule.warmup_steps, schedule.total_steps
    )
    rates = []
    for _ in range(schedule.total_steps + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@settings(max_examples=25)
@given(peak=st.floats(1e-7, 1.0), run=runs)
def test_lines_are_those_of_transformers_without_its_step_at_rate_zero(
    peak: float, run: tuple[int, int]
) -> None:
    schedule = Schedule(peak, *run)
    expected = rates_of_transformers(schedule)
    # Where all is warm-up, transformers' last rate is one of decay.
    expected[run[0]] = peak

    # transformers' first warm-up rate is 0; ours are those of the step that follows.
    warmup, decay = expected[1 : run[0] + 1], expected[run[0] : run[1]]

    rates = [schedule.learning_rate_at(step) for step in range(schedule.total_steps)]
    assert rates == pytest.approx(warmup + decay, rel=1e-9, abs=0)
