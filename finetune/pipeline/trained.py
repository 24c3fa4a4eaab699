"""A finished run's configuration and model, loaded to be used."""

from dataclasses import replace

from torch import nn

from finetune.config.load import load_config
from finetune.config.schema import Config
from finetune.devices.base import Device
from finetune.devices.names import DeviceName
from finetune.events import Tell
from finetune.model.load import Classifier, load_classifier
from finetune.runs.folder import RunFolder, read_json


def config_of(folder: RunFolder, *, device: DeviceName) -> Config:
    """Return a run's configuration, with another device."""
    saved = load_config(
        file=str(folder.config_file), environment={}, flags={}, assignments=()
    ).config
    return replace(saved, training=replace(saved.training, device=device))


def load_trained(folder: RunFolder, *, tell: Tell) -> Classifier:
    """Load the model that a run has saved."""
    names_by_number = read_json(folder.model_folder / "config.json")["id2label"]
    class_names = [names_by_number[str(number)] for number in range(len(names_by_number))]
    return load_classifier(
        str(folder.model_folder), revision=None, class_names=class_names, tell=tell
    )


def place(classifier: Classifier, device: Device) -> nn.Module:
    """Move a model to a device and return it."""
    model: nn.Module = classifier.model
    return model.to(device.torch_device)
