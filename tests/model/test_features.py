from pathlib import Path

from tiny_models import tiny_model
from tiny_training import FewShapesDevice, random_examples

from finetune.config.mode import Mode
from finetune.events import ignore
from finetune.model.feature_extractor import split_frozen
from finetune.model.features import FrozenLayers, with_features
from finetune.model.freeze import freeze_parameters
from finetune.model.structure import find_structure
from finetune.model.tensor_store import TensorStore


def test_no_text_is_alone_where_the_device_would_drop_its_bias(tmp_path: Path) -> None:
    model = tiny_model()
    structure = find_structure(model)
    freeze_parameters(model, structure, mode=Mode("classifier"))
    extractor = split_frozen(model, takes_4d_mask=structure.takes_4d_mask, pads_left=False)
    assert extractor is not None
    sizes: list[int] = []
    model.get_submodule("bert.pooler").register_forward_hook(
        lambda _, __, pooled: sizes.append(len(pooled))
    )
    device = FewShapesDevice(min_examples=2)
    layers = FrozenLayers(extractor, "", device, "fp32", structure.takes_4d_mask)
    store = TensorStore(tmp_path, 2**20)
    with_features(
        random_examples(3), layers, store, padded_lengths=[12],
        batch_size=1, notes={"split": "train"}, emit=ignore,
    )  # fmt: skip
    assert sizes == [2, 2, 2]
    [entry] = store.entries()
    assert entry.facts["shape"] == [3, 32]
