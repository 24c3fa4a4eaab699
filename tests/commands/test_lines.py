import io

import pytest
from commands.test_live import step_event, validation
from rich.console import Console

from finetune.commands.console import LITERAL
from finetune.commands.lines import Lines
from finetune.events import StageFinished, stage


@pytest.mark.parametrize(
    ("epochs", "steps_an_epoch", "most_lines"),
    [(100, 23, 10), (40, 7, 10), (6, 50, 16), (3, 40, 9)],
)
def test_a_pipe_gets_few_lines_whatever_the_number_of_epochs(
    epochs: int, steps_an_epoch: int, most_lines: int
) -> None:
    total = epochs * steps_an_epoch
    console = Console(file=io.StringIO(), width=200, **LITERAL)
    lines = Lines(console, is_quiet=False)
    with stage("train", lines.show):
        for number in range(1, total + 1):
            epoch, rest = divmod(number, steps_an_epoch)
            if number % 10 == 0 or rest == 0:
                lines.show(step_event(number, total=total))
            if rest == 0:
                found = validation(number, epoch=epoch, accuracy=0.5, is_best=epoch == 2)
                lines.show(found)
    lines.show(StageFinished("train", 72.0))
    assert isinstance(console.file, io.StringIO)
    *progress, last = console.file.getvalue().splitlines()
    assert min(epochs, 10) <= len(progress) <= most_lines
    assert progress[-1].startswith(f"epoch {epochs}.00: validation accuracy 0.5000")
    assert last == f"train: 1:12, {total:,}/{total:,} steps, best accuracy 0.5000 at epoch 2"
