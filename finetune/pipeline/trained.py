"""A finished run's configuration and model, loaded to be used."""

from torch import nn

from finetune.config.load import load_config
from finetune.config.schema import Config
from finetune.devices.base import Device
from finetune.errors import ModelUnsupported
from finetune.events import Emit
from finetune.files import read_json
from finetune.model.load import Classifier, load_classifier
from finetune.runs.folder import RunFolder


def load_saved_config(folder: RunFolder) -> Config:
    """Return the configuration that a run was made with."""
    file = str(folder.config_file)
    return load_config(file=file, environment={}, flags={}, assignments=()).config


def load_trained(folder: RunFolder, *, emit: Emit) -> Classifier:
    """Load the model that a run has saved."""
    try:
        names_by_number = read_json(folder.model_folder / "config.json")["id2label"]
        class_names = [names_by_number[str(number)] for number in range(len(names_by_number))]
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnsupported(
            f"the model of {folder.path} is damaged: its config.json can't be read",
            remedy="make the run again",
        ) from error
    return load_classifier(
        str(folder.model_folder), revision=None, class_names=class_names, emit=emit
    )


def place(classifier: Classifier, device: Device) -> nn.Module:
    """Move a model to a device and return it."""
    model: nn.Module = classifier.model
    return model.to(device.torch_device)
