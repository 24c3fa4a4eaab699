"""The model card: what a reader on the Hub, or in the folder, should know of a model."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from finetune.data.load import HUB_PREFIX
from finetune.files import read_json, write_text_atomically
from finetune.model.source import MINILM, MINILM_REPOSITORY
from finetune.runs.folder import RunFolder

TEMPLATE = Path(__file__).with_name("card.md.j2")
DATASET_IDS = {"trec": "CogComp/trec"}
FILES_OF_DATA = ("validation_file", "test_file")


def write_model_card(folder: RunFolder) -> Path:
    """Write the card of a finished run's model, ``README.md``, and return where it lies.

    The card is made to be published: of the folders and files on this machine it names at most
    the last part.

    Args:
        folder: The run; its configuration, figures and model are there.
    """
    results = read_json(folder.results_file)
    config = yaml.safe_load(folder.config_file.read_text(encoding="utf-8"))
    name = folder.path.resolve().name
    card = ModelCard.from_template(
        _metadata(results, config, name=name),
        template_path=str(TEMPLATE),
        name=name,
        results=results,
        rows=sum(map(sum, results["test_confusion_matrix"])),
        base=_public_name(results["model"]),
        data=_name_of_data(results["data"]),
        per_class={_cell(label): row for label, row in results["test_per_class"].items()},
        max_length=config["model"]["max_length"],
        config=_public_config(config),
    )
    path = folder.model_folder / "README.md"
    write_text_atomically(path, f"{card}\n")
    return path


def _metadata(results: Mapping[str, Any], config: Mapping[str, Any], *, name: str) -> ModelCardData:
    data = _name_of_data(results["data"])
    is_on_hub = results["data"].startswith(HUB_PREFIX)
    dataset_id = data if is_on_hub else DATASET_IDS.get(data)
    metrics = [
        EvalResult(
            task_type="text-classification",
            dataset_type=dataset_id or data,
            dataset_name=data,
            dataset_config=config["data"]["label"] if data in DATASET_IDS else None,
            dataset_split="test",
            metric_type=metric,
            metric_name=metric_name,
            metric_value=results[key],
        )
        for key, metric, metric_name in (
            ("test_accuracy", "accuracy", "Accuracy"),
            ("test_macro_f1", "f1", "Macro F1"),
        )
    ]
    return ModelCardData(
        model_name=name,
        base_model=_hub_id(results["model"]),
        datasets=[dataset_id] if dataset_id else None,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["finetune-mps"],
        metrics=["accuracy", "f1"],
        eval_results=metrics,
    )


def _hub_id(source: str) -> str | None:
    """Return the Hub id that the name of a model or data set is, or None for what lies here."""
    if source == MINILM:
        return MINILM_REPOSITORY
    try:
        validate_repo_id(source)
    except HFValidationError:
        return None
    return None if Path(source).exists() else source


def _public_name(source: str) -> str:
    return _hub_id(source) or Path(source).name


def _name_of_data(source: str) -> str:
    if source.startswith(HUB_PREFIX):
        return source.removeprefix(HUB_PREFIX).partition("@")[0]
    return Path(source).name


def _file_name(path: str | None) -> str | None:
    return None if path is None else Path(path).name


def _public_config(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the options that decide the model as YAML, without folders of this machine."""
    data = {
        **config["data"],
        "data": _name_of_data(config["data"]["data"]),
        "data_dir": None,
        **{name: _file_name(config["data"].get(name)) for name in FILES_OF_DATA},
    }
    model = {**config["model"], "model": _public_name(config["model"]["model"])}
    sections = {"data": data, "model": model, "training": config["training"]}
    given = {
        name: {option: value for option, value in options.items() if value is not None}
        for name, options in sections.items()
    }
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True)


def _cell(text: str) -> str:
    r"""Return text that neither ends a cell of a Markdown table nor begins an element of HTML.

    >>> _cell("a|b <c>")
    'a\\|b &lt;c&gt;'
    """
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
