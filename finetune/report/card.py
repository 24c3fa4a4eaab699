"""The model card, for readers on the Hub or in the folder."""

import html
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from finetune.config.schema import HUB_PREFIX, OPTIONS, Config
from finetune.files import escape_controls, escape_line, write_text_atomically
from finetune.report.templates import TEMPLATES, hub_id, without_folder
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import read_trained_config, reads_pairs
from finetune.runs.results import RunResults, summarize
from finetune.tasks.tables import capitalize

# For Markdown, templates escape text themselves.
_MARKDOWN = TEMPLATES.overlay(autoescape=False, trim_blocks=False, lstrip_blocks=False)
TREC_ID = "CogComp/trec"


def write_cards(folder: RunFolder, results: RunResults) -> None:
    """Write ``README.md`` next to the model of a run and next to its adapter, if any.

    Cards can be published, so they contain only the last part of local paths.
    """
    file = folder.adapter_folder / "adapter_config.json"
    if file.is_file():
        adapter = folder.read(file, dict)
        adapter["base_model_name_or_path"] = _as_code(adapter["base_model_name_or_path"])
        _write_card(folder.adapter_card_file, folder, results, adapter)
    _write_card(folder.card_file, folder, results)


def _write_card(
    file: Path, folder: RunFolder, results: RunResults, adapter: dict[str, Any] | None = None
) -> None:
    config, facts = folder.read_config(), results.facts
    options = read_trained_config(folder).model
    name = folder.path.resolve().name
    metadata = _metadata(results, config, name=name)
    if adapter:
        metadata.library_name = "peft"
    card = _MARKDOWN.get_template("card.md.j2").render(
        card_data=metadata.to_yaml(),
        adapter=adapter,
        name=_as_words(name),
        results=results,
        summary=_as_sentences(summarize(results)),
        base=_as_code(_published_model(facts.model)),
        data=_as_code(_title_of_data(facts.data)),
        cell=_as_words,
        reads_pairs=reads_pairs(folder),
        options=options,
        config=_public_config(config),
    )
    write_text_atomically(file, f"{card}\n")


def _metadata(results: RunResults, config: Config, *, name: str) -> ModelCardData:
    data, values = _title_of_data(results.facts.data), results.test.values
    dataset_id, part = (TREC_ID, str(config.data.label)) if data == "trec" else (None, None)
    if results.facts.data.startswith(HUB_PREFIX):
        dataset_id, _, part = data.partition(":")
    return ModelCardData(
        model_name=name,
        base_model=hub_id(results.facts.model),
        datasets=[dataset_id] if dataset_id else None,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["finetune-mps"],
        metrics=[*dict.fromkeys(value.metric.hub_name for value in values)],
        eval_results=[
            EvalResult(
                task_type="text-classification",
                dataset_type=dataset_id or data,
                dataset_name=data,
                dataset_config=part or None,
                dataset_split="test",
                metric_type=value.metric.hub_name,
                metric_name=capitalize(value.metric.title),
                metric_value=value.value,
            )
            for value in values
        ],
    )


def _title_of_data(data: str) -> str:
    if data.startswith(HUB_PREFIX):
        return data.removeprefix(HUB_PREFIX).partition("@")[0]
    return str(without_folder("data", data))


def _published_model(model: str) -> str:
    return hub_id(model) or Path(model).name


def _public_config(config: Config) -> str:
    """Return the options that determine the model as YAML, without local folders."""
    chosen: dict[str, dict[str, Any]] = {"data": {}, "model": {}, "training": {}}
    for name, option in OPTIONS.items():
        value = without_folder(name, option.value_in(config))
        if option.section in chosen and value is not None and name != "data_dir":
            chosen[option.section][name] = value
    chosen["model"]["model"] = _published_model(config.model.model)
    shown = yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)
    return shown if shown == escape_controls(shown) else yaml.safe_dump(chosen, sort_keys=False)


def _as_words(text: str) -> str:
    """Escape Markdown links, images, HTML and cell separators in text."""
    line = html.escape(escape_line(" ".join(text.split())), quote=False)
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", line)


def _as_sentences(text: str) -> str:
    """Replace code in sentences by bold names, because markup in code can't be escaped."""
    return re.sub("`([^`]*)`", lambda name: f"**{_as_words(name[1])}**", escape_line(text))


def _as_code(text: str) -> str:
    """Return text on one line, without backticks that would end the surrounding code."""
    return escape_line(text).replace("`", "'")
