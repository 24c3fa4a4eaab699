import torch

from finetune.model.inputs import model_inputs

MASK = torch.tensor([[True, True, True], [True, False, False]])
TENSORS = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": MASK}


def test_ready_mask_has_a_place_for_heads_and_queries() -> None:
    inputs = model_inputs(TENSORS, takes_4d_mask=True)

    assert inputs["attention_mask"].shape == (2, 1, 1, 3)
    assert inputs["attention_mask"].dtype == torch.bool
    assert torch.equal(inputs["attention_mask"][:, 0, 0], MASK)
    assert inputs["input_ids"] is TENSORS["input_ids"]


def test_usual_mask_is_of_numbers() -> None:
    inputs = model_inputs(TENSORS, takes_4d_mask=False)

    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert inputs["attention_mask"].dtype == torch.int64


def test_given_tensors_stay_as_they_are() -> None:
    model_inputs(TENSORS, takes_4d_mask=True)

    assert TENSORS["attention_mask"] is MASK
