from dataclasses import replace

import pytest
from tiny_models import ARCHITECTURES, tiny_case
from transformers import BertConfig

from finetune.batch_finder.case import Case, architecture_of

CASE = tiny_case()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_case_comes_back_from_its_line(architecture: str) -> None:
    case = tiny_case(architecture)
    assert Case.from_json(case.to_json()) == case
    assert "\n" not in case.to_json()


def test_equal_cases_have_one_line_whatever_the_order_of_their_architecture() -> None:
    reordered = dict(reversed(CASE.architecture.items()))
    assert replace(CASE, architecture=reordered).to_json() == CASE.to_json()


def test_two_models_that_differ_only_in_their_origin_and_classes_are_one_architecture() -> None:
    one = BertConfig(num_labels=2, name_or_path="here")
    other = BertConfig(num_labels=50, name_or_path="there", architectures=["BertModel"])
    assert architecture_of(one.to_dict()) == architecture_of(other.to_dict())
    assert architecture_of(one.to_dict()) != architecture_of(BertConfig(hidden_size=96).to_dict())
