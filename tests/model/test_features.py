from pathlib import Path

from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_training import FewShapesDevice, random_examples

from finetune.config.mode import Mode
from finetune.devices.base import Device
from finetune.model.features import FrozenLayers, split_frozen, with_features
from finetune.model.freeze import freeze_parameters
from finetune.model.structure import find_structure
from finetune.model.tensor_store import TensorStore
from finetune.tokenization.examples import Examples


def frozen_layers(mode: str, device: Device) -> FrozenLayers:
    model = tiny_model()
    structure = find_structure(model)
    freeze_parameters(model, structure, mode=Mode(mode))
    extractor = split_frozen(model, takes_4d_mask=structure.takes_4d_mask, pads_left=False)
    assert extractor is not None
    return FrozenLayers(extractor, "", device, "fp32", structure.takes_4d_mask)


def extract(
    layers: FrozenLayers, store: TensorStore, *, rows: int = 23, batch_size: int = 4
) -> Examples:
    return with_features(
        random_examples(rows), layers, store, padded_lengths=[12], batch_size=batch_size,
        split="train")  # fmt: skip


def test_no_text_is_alone_where_the_device_would_drop_its_bias(tmp_path: Path) -> None:
    layers = frozen_layers("classifier", FewShapesDevice(min_examples=2))
    sizes: list[int] = []
    layers.extractor.model.get_submodule("bert.pooler").register_forward_hook(
        lambda _, __, pooled: sizes.append(len(pooled))
    )
    store = TensorStore(tmp_path, 2**20)
    extract(layers, store, rows=3, batch_size=1)
    assert sizes == [2, 2, 2]
    [file] = store.entries()
    assert load_file(file)["features"].shape == (3, 32)
