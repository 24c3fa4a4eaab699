"""``finetune label``: unlabeled texts become a labeled table, in the browser."""

import secrets
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from finetune.commands import flags
from finetune.commands.console import show_json
from finetune.events import Info, emit
from finetune.files import escape_line
from finetune.web import require_packages

EXAMPLES = """\b
Examples:
  finetune label texts.csv --classes refund,praise,bug
  finetune label tickets.txt --model minilm
  finetune run texts.labels.csv                     train from the labels
"""


@click.command(epilog=EXAMPLES)
@click.argument("file", type=flags.PATH)
@click.option("--classes", help="Names of the classes, such as refund,praise,bug.")
@click.option("--multi-label", is_flag=True, help="Let a text have any number of classes.")
@flags.chosen_options(
    *("text_column", "text_pair_column", "label_column", "encoding", "model", "revision"),
    *("max_length", "device", "cache_dir"),
    not_guessed=["max_length"],
)
@click.option("--port", type=flags.PORT, default=0, help="Port.  [default: a free one]")
@click.option("--no-browser", is_flag=True, help="Print the address without opening it.")
@flags.with_display
def command(
    *,
    file: Path,
    classes: str | None,
    multi_label: bool,
    port: int,
    no_browser: bool,
    display: flags.Display,
    **options: Any,
) -> None:
    """Label the texts of FILE in the browser.

    FILE is a table or has one text per line. Every label is saved immediately, next to FILE. Labels
    of texts.csv go to texts.labels.csv, which finetune run reads. Ctrl-C stops the server, and the
    same command continues.
    """
    require_packages()
    with display.progress():
        import pyarrow

        from finetune.runs.guess import suggest_encoder
        from finetune.tasks.labels import name_classes
        from finetune.web.journal import LabelJournal, TextEncoder, read_label_source
        from finetune.web.labeling import LabelingSession, make_label_app
        from finetune.web.server import bind, local_hosts, run_server

        loaded = flags.load(data=str(file), **options)
        file, config = file.expanduser(), loaded.config
        source = read_label_source(file, config.data, is_multi_label=multi_label)
        if "model" not in loaded.sources:
            model = suggest_encoder(pyarrow.chunked_array([source.texts[0]]))
            config = replace(config, model=replace(config.model, model=model))
            emit(Info(f"guessed: --model {model}"))
    source.labels.add_classes(name_classes((classes or "").split(",")).values())
    journal = LabelJournal(file, source)
    session = LabelingSession(journal, TextEncoder(config))
    token, listener = secrets.token_urlsafe(16), bind("127.0.0.1", port)
    port = listener.getsockname()[1]
    app = make_label_app(session, name=file.name, hosts=local_hosts(port), token=token)
    address = f"http://127.0.0.1:{port}/?token={token}"
    if display.as_json:
        show_json({"address": address, "file": str(journal.table_path)})
    else:
        click.echo(f"label {escape_line(str(file))} at {address} (Ctrl-C stops)")
    session.start()
    # The endpoints wait less for the interpreter while a head is fitted.
    sys.setswitchinterval(0.0005)
    if not no_browser:
        webbrowser.open(address)
    run_server(app, listener)
    session.stop()
    if not display.quiet:
        count = f"{len(journal.labels.rows):,} labeled texts"
        click.echo(f"{count}; train with: {escape_line(session.command)}", err=True)
