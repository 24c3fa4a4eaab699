"""``finetune predict``."""

import sys
from dataclasses import asdict
from pathlib import Path

import click

from finetune.cli.console import show_json, show_table, showing
from finetune.cli.options import device_option, output_options
from finetune.devices.names import DeviceName
from finetune.errors import DataNotFound, DataUnreadable, UsageError
from finetune.runs.folder import open_run_folder


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "-f", "--file", type=click.Path(path_type=Path), help="File with one text per line, or -."
)
@device_option
@output_options
def command(
    run: Path,
    texts: tuple[str, ...],
    *,
    file: Path | None,
    device: DeviceName,
    as_json: bool,
    **output: bool,
) -> None:
    """Classify texts with the model in the run folder RUN.

    The texts are arguments, the lines of a file or of standard input; blank lines are skipped. The
    output has their order: a table, or with --json one object per line.
    """
    if texts and file is not None:
        raise UsageError("both texts and --file were given", remedy="give one of them")
    open_run_folder(run)
    lines = [_check_encoding(text) for text in texts] or _read_lines(file)
    with showing(**output) as emit:
        from finetune.api.predict import predict

        answers = predict(run, lines, device=device, emit=emit)
    if as_json:
        for answer in answers:
            show_json(asdict(answer))
        return
    rows = [(one.label, f"{one.probability:.3f}", one.text) for one in answers]
    show_table(("label", "probability", "text"), rows)


def _check_encoding(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        remedy = "set the terminal's encoding to UTF-8"
        raise DataUnreadable(f"the text {text!r} is not UTF-8", remedy=remedy) from error
    return text


def _read_lines(file: Path | None) -> list[str]:
    """Return the lines of a file or of standard input that are not blank."""
    if file in (None, Path("-")):
        place, content = "standard input", sys.stdin.buffer.read()
    elif file.is_file():
        place, content = str(file), file.read_bytes()
    else:
        raise DataNotFound(f"there is no file {file}", remedy="check the name after --file")
    try:
        # Not splitlines, which also splits at marks that stand inside texts, such as U+2028.
        lines = content.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataUnreadable(
            f"{place} is not UTF-8: {error.reason} at byte {error.start}",
            remedy="convert it first, for example with iconv -f latin1 -t utf-8",
        ) from error
    if texts := [line for line in lines if line.strip()]:
        return texts
    raise DataNotFound(f"{place} has no texts", remedy="write one text per line")
