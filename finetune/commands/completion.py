"""``finetune completion``."""

import click
from click.shell_completion import get_completion_class

from finetune.commands import flags

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
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@flags.debug_option
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and choices in a shell."""
    completion = get_completion_class(shell)
    assert completion
    script = completion(context.find_root().command, {}, "finetune", "_FINETUNE_COMPLETE")
    click.echo(script.source())
