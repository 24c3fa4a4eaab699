"""``finetune completion``."""

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from finetune.commands.options import debug_option

SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


START_FILES = """\b
Examples:
  finetune completion zsh > _finetune
  finetune completion fish | source

\b
Put the line of your shell into the file that it reads when it starts:
  ~/.bashrc                   eval "$(finetune completion bash)"
  ~/.zshrc                    eval "$(finetune completion zsh)"
  ~/.config/fish/config.fish  finetune completion fish | source

zsh needs `autoload -Uz compinit && compinit` in a line above it. bash must be 4.4 or newer; the
one that comes with macOS is 3.2.
"""


@click.command(epilog=START_FILES)
@click.argument("shell", type=click.Choice(list(SHELLS)))
@debug_option
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and choices in a shell."""
    finetune = context.find_root().command
    script = SHELLS[shell](
        finetune, ctx_args={}, prog_name="finetune", complete_var="_FINETUNE_COMPLETE"
    )
    click.echo(script.source())
