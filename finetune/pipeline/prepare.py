"""Everything that a run needs before its first update, short of reading the texts."""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import DatasetDict

from finetune.config.schema import Config, DataConfig, mode_of
from finetune.data.load import load_data, source_name
from finetune.data.source import DataOptions
from finetune.data.split import split_table
from finetune.devices.base import Device
from finetune.devices.select import check_precision, select_device
from finetune.events import Emit, Stage
from finetune.model.freeze import count_parameters, freeze_parameters
from finetune.model.load import Classifier, load_classifier
from finetune.model.mode import Mode
from finetune.runs.folder import RunFolder, check_run_folder, next_free_folder

RUNS_FOLDER = Path("runs")


@dataclass(frozen=True)
class Prepared:
    """What a run starts from.

    Args:
        config: The run's options.
        device: Where it trains.
        table: The splits ``train``, ``test`` and, unless its fraction is 0, ``validation``.
        classifier: The model, frozen as the mode says, on the CPU.
    """

    config: Config
    device: Device
    table: DatasetDict
    classifier: Classifier

    @property
    def mode(self) -> Mode:
        """What trains."""
        return mode_of(self.config.model)


def prepare(config: Config, *, emit: Emit) -> Prepared:
    """Select the device, load the data and the model, and freeze what does not train.

    Raises:
        FinetuneError: Of every kind that a device, data or a model can cause.
    """
    device = select_device(config.training.device, emit=emit)
    check_precision(device, config.training.precision)
    emit(Stage(f"device: {device.name} ({device.description}), {config.training.precision}"))
    table = load_splits(config, emit=emit)
    torch.manual_seed(config.training.seed)
    classifier = load_classifier(
        config.model.model,
        revision=config.model.revision,
        class_names=table["train"].features["label"].names,
        emit=emit,
    )
    mode = mode_of(config.model)
    freeze_parameters(classifier.model, classifier.structure, mode=mode)
    trained, total = count_parameters(classifier.model)
    emit(
        Stage(
            f"model: {config.model.model}, mode {mode}, {trained:,} of {total:,} parameters train "
            f"({trained / total:.1%})"
        )
    )
    return Prepared(config, device, table, classifier)


def load_given_splits(options: DataConfig, *, emit: Emit) -> DatasetDict:
    """Load the data with the splits that it brings, ``train`` among them."""
    folder, validation_file, test_file = (
        Path(path).expanduser() if path else None
        for path in (options.data_dir, options.validation_file, options.test_file)
    )
    wanted = DataOptions(
        data=options.data,
        folder=folder,
        label=options.label,
        validation_file=validation_file,
        test_file=test_file,
        text_column=options.text_column,
        label_column=options.label_column,
        encoding=options.encoding,
    )
    return load_data(wanted, emit=emit).splits


def load_splits(config: Config, *, emit: Emit) -> DatasetDict:
    """Load the data and split it: the same rows for the same configuration, every time."""
    return split_given(load_given_splits(config.data, emit=emit), config.data, emit=emit)


def split_given(given: DatasetDict, options: DataConfig, *, emit: Emit) -> DatasetDict:
    """Hold out the splits that the data does not bring, and take as many rows as are wanted."""
    table = split_table(
        given,
        validation_fraction=options.validation_fraction,
        test_fraction=options.test_fraction,
        seed=options.split_seed,
        emit=emit,
    )
    if options.max_train_samples is not None:
        rows = min(options.max_train_samples, len(table["train"]))
        table["train"] = table["train"].select(range(rows))
    counts = ", ".join(f"{len(rows):,} {split}" for split, rows in table.items())
    classes = len(table["train"].features["label"].names)
    emit(Stage(f"data: {options.data}, {counts} rows, {classes} classes"))
    return table


def find_run_folder(config: Config) -> RunFolder:
    """Return the folder that a new run gets, having made sure that it may be written.

    Raises:
        RunFolderNotEmpty: If the folder that the configuration names holds something.
    """
    if config.output.output_dir is not None:
        folder = RunFolder(Path(config.output.output_dir).expanduser())
        check_run_folder(folder, overwrite=config.output.overwrite)
        return folder
    parts = [source_name(config.data.data), Path(config.model.model).name, mode_of(config.model)]
    return RunFolder(next_free_folder(RUNS_FOLDER, "-".join(parts)))
