"""``finetune label``: turns unlabeled texts into a labeled table, in the browser."""

import secrets
import sys
import webbrowser
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import show_json
from finetune.commands.data import AUDITS_FOLDER
from finetune.config.schema import OPTIONS, Config
from finetune.errors import UsageError
from finetune.events import Info, WarningMessage, emit, muted
from finetune.files import escape_line
from finetune.web import require_packages

if TYPE_CHECKING:
    from finetune.config.load import LoadedConfig
    from finetune.web.labeling import LabelingSession

EXAMPLES = """\b
Examples:
  finetune label texts.csv --classes refund,praise,bug
  finetune label texts.csv --class-descriptions classes.csv
  finetune label tickets.txt --model minilm
  finetune run texts.labels.csv                     train on the labels
  finetune label reviews.csv --suspects             review doubtful labels
"""
READING = ("text_column", "text_pair_column", "label_column", "encoding")
OF_CLASSES = ("classes", "class_descriptions")
OF_MODEL = ("model", "revision", "max_length", "device", "cache_dir")


@click.command(epilog=EXAMPLES)
@click.argument("file", type=flags.PATH)
@flags.chosen_options(*OF_CLASSES)
@click.option("--multi-label", is_flag=True, help="Let a text have any number of classes.")
@click.option("--suspects", is_flag=True, help="Review the labels that finetune data audit listed.")
@flags.chosen_options(*READING, *OF_MODEL, not_guessed=["max_length"])
@click.option("--port", type=flags.PORT, default=0, help="Port.  [default: a free port]")
@click.option("--no-browser", is_flag=True, help="Print the URL without opening it.")
@flags.with_display
def command(
    *,
    file: Path,
    multi_label: bool,
    suspects: bool,
    port: int,
    no_browser: bool,
    display: flags.Display,
    **options: Any,
) -> None:
    """Label the texts of FILE in the browser.

    FILE is a table, or a text file with one text per line. Every label is saved immediately, next
    to FILE: labels of texts.csv go to texts.labels.csv, which finetune run reads. Ctrl-C stops the
    server, and the same command continues. Before the first label, the model suggests classes from
    their names or descriptions. With --suspects, the page shows the labels listed by finetune data
    audit, and decisions are saved in suspects.csv in the audit folder.
    """
    require_packages()
    with display.progress():
        from finetune.web.labeling import make_label_app
        from finetune.web.server import bind, local_hosts, run_server

        loaded = flags.load(data=str(file), **options)
        if suspects and (multi_label or loaded.sources.keys() & {*OF_CLASSES}):
            remedy = "drop --classes, --class-descriptions and --multi-label"
            raise UsageError("--suspects uses the classes in the data", remedy=remedy)
        if suspects:
            session = review_suspects(loaded)
        else:
            session = open_session(loaded, is_multi=multi_label)
    table = session.journal.table_path
    token, listener = secrets.token_urlsafe(16), bind("127.0.0.1", port)
    port = listener.getsockname()[1]
    app = make_label_app(session, name=file.name, hosts=local_hosts(port), token=token)
    address = f"http://127.0.0.1:{port}/?token={token}"
    if display.as_json:
        show_json({"address": address, "file": str(table)})
    else:
        click.echo(f"label {escape_line(str(file))} at {address} (Ctrl-C stops)")
    # Switch threads more often, so endpoints stay responsive while a head is fitted.
    sys.setswitchinterval(0.0005)
    with replace(display, quiet=True).progress():  # shows only warnings
        session.start()
        if not no_browser:
            webbrowser.open(address)
        run_server(app, listener)
        session.stop()
    if not display.quiet:
        count = f"{len(session.journal.labels.rows):,} labels in {escape_line(str(table))}"
        click.echo(f"{count}; train with: {escape_line(session.command())}", err=True)


def open_session(loaded: "LoadedConfig", *, is_multi: bool) -> "LabelingSession":
    """Return a session for labeling the texts in a file."""
    import pyarrow

    from finetune.data.classes import declared_classes, describe_classes
    from finetune.runs.guess import MAX_ROWS_PER_CLASS, suggest_encoder
    from finetune.tasks.labels import find_odd_names
    from finetune.web.journal import LabelJournal, TextEncoder, read_label_source
    from finetune.web.labeling import LabelingSession

    config, file = loaded.config, Path(loaded.config.data.data).expanduser()
    source = read_label_source(file, config.data, is_multi_label=is_multi)
    if "model" not in loaded.sources:
        model = suggest_encoder(pyarrow.chunked_array([source.texts[0]]), has_few_rows=True)
        config = replace(config, model=replace(config.model, model=model))
        emit(Info(f"guessed: --model {model} (there are few labels at first)"))
    source.labels.add_classes(declared_classes(config.data))
    descriptions: dict[str, list[str]] = {}
    for text, name in zip(*describe_classes(source.labels.classes, config.data), strict=True):
        descriptions.setdefault(name, []).append(text)
    for finding, _ in find_odd_names(source.labels.classes):
        emit(WarningMessage(finding, remedy="rename or merge them on the page"))
    journal = LabelJournal(file, source)
    train = f"finetune run {quote(str(journal.table_path))}"
    train += _flags(config, {"model", *loaded.sources} - {*READING, *OF_CLASSES})
    # With the options of this command, run might choose other columns of the file.
    is_plain = loaded.sources.keys().isdisjoint(READING) and not source.is_multi_label

    def command() -> str:
        labels = journal.labels
        is_few = len(labels.rows) <= MAX_ROWS_PER_CLASS * len(labels.classes)
        is_useful = is_plain and is_few and len(labels.rows) < (~source.is_blank).sum()
        named = [] if source.is_multi_label else labels.classes
        is_missing = len(named) > 1 and not all(labels.counts().values())
        described = descriptions.keys() <= {*named} and config.data.class_descriptions
        options = {
            "--unlabeled": str(file) if is_useful else None,
            # Classes without labeled rows are known from their name or description.
            "--classes": ",".join(named) if is_missing else None,
            "--class-descriptions": described,
        }
        return train + "".join(f" {flag} {quote(v)}" for flag, v in options.items() if v)

    encoder = TextEncoder(config)
    return LabelingSession(journal, encoder, descriptions=descriptions, command=command)


def review_suspects(loaded: "LoadedConfig") -> "LabelingSession":
    """Return a session for reviewing the suspects of an audit."""
    from finetune.data.check import match_misspelled_names
    from finetune.data.load import load_data, source_name
    from finetune.report.page import SUSPECTS
    from finetune.web.labeling import LabelingSession
    from finetune.web.suspects import Suspects

    options = loaded.config.data
    path = AUDITS_FOLDER / source_name(options.data) / SUSPECTS
    if not path.is_file():
        remedy = f"run finetune data audit {quote(options.data)} first, in this folder"
        raise UsageError(f"file not found: {path}", remedy=remedy)
    with muted():
        loaded_data = load_data(options)
    task, labels = loaded_data.task, loaded_data.splits["train"]["label"]
    if not task.class_names:
        remedy = f"write keep, drop or a number into the `decision` column of {path}"
        raise UsageError(f"{options.data} has no classes to choose from", remedy=remedy)
    misspelled = match_misspelled_names(task.count_classes(task.labels(labels)))
    is_multi = task.name == "multi"
    journal = Suspects(path, task.class_names, is_multi_label=is_multi, misspelled=misspelled)
    train = f"finetune run {quote(options.data)}{_flags(loaded.config, loaded.sources)}"

    def command() -> str:
        label_map = f" --label-map {quote(str(journal.map_path))}"
        corrected = f"{train} --corrections {quote(str(path))}"
        return corrected + label_map * journal.map_path.exists()

    return LabelingSession(journal, command=command)


def _flags(config: Config, names: Collection[str]) -> str:
    """Return the options of this command as flags of ``finetune run``."""
    options = (OPTIONS[name] for name in (*READING, *OF_MODEL) if name in names)
    return "".join(f" {o.flag} {quote(str(o.value_in(config)))}" for o in options)
