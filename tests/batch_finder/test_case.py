from transformers import BertConfig

from finetune.batch_finder.case import architecture_of


def test_two_models_that_differ_only_in_their_origin_and_classes_are_one_architecture() -> None:
    one = BertConfig(num_labels=2, name_or_path="here")
    other = BertConfig(num_labels=50, name_or_path="there", architectures=["BertModel"])
    assert architecture_of(one.to_dict()) == architecture_of(other.to_dict())
    assert architecture_of(one.to_dict()) != architecture_of(BertConfig(hidden_size=96).to_dict())
