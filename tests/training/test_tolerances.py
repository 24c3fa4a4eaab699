import math

import pytest
import torch

from finetune.training.tolerances import relative_error, worst_example_error


def test_relative_error_is_that_of_the_whole_tensor() -> None:
    expected = torch.tensor([3.0, 4.0, 0.0])
    actual = expected + torch.tensor([0.0, 0.0, 0.5])
    assert relative_error(actual, expected, least_size=0.0) == pytest.approx(0.1)


def test_a_tiny_gradient_is_measured_by_the_size_of_others() -> None:
    rounding = torch.full((4,), 1e-9)
    assert relative_error(-rounding, rounding, least_size=1e-3) == pytest.approx(2e-6)


def test_nothing_in_place_of_nothing_is_right_and_something_is_infinitely_wrong() -> None:
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros, least_size=0.0) == 0.0
    assert relative_error(zeros + 1e-9, zeros, least_size=0.0) == math.inf
    assert relative_error(zeros * math.nan, zeros + 1, least_size=1.0) == math.inf


def test_one_wrong_example_among_many_is_as_wrong_as_alone() -> None:
    expected = torch.ones(100, 6)
    actual = expected.clone()
    actual[42] *= 1.5
    assert worst_example_error(actual, expected) == pytest.approx(0.5)
