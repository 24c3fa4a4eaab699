"""A wrong use of the command line, as an error whose remedy names what was meant."""

from difflib import get_close_matches

import click

from finetune.config.schema import OPTION_OF_TRAINER
from finetune.errors import UsageError


def explain_usage(error: click.UsageError) -> UsageError:
    """Return click's error in one line, and what to do."""
    place = error.ctx.command_path if error.ctx else "finetune"
    remedy = f"see {place} --help"
    if meant := _find_meant(error):
        return UsageError(error.message, remedy=f"did you mean {meant}? {remedy}")
    return UsageError(" ".join(error.format_message().split()), remedy=remedy)


def _find_meant(error: click.UsageError) -> str | None:
    """Return what click does not find: its guesses are the names that are spelt alike."""
    if error.ctx is None:
        return None
    command, options = error.ctx.command, {one.name for one in error.ctx.command.params}
    if isinstance(error, click.NoSuchOption):
        option = OPTION_OF_TRAINER.get(error.option_name.strip("-").replace("-", "_"))
        return f"--{option.replace('_', '-')}" if option in options else None
    if isinstance(error, click.exceptions.NoSuchCommand) and isinstance(command, click.Group):
        near = get_close_matches(error.command_name, command.list_commands(error.ctx), n=1)
        return f"{error.ctx.command_path} {near[0]}" if near else None
    if "unexpected extra argument" in error.message and "data" in options:
        return "--data FILE"
    return None
