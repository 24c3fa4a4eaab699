import re

import pytest
from commands.test_progress import terminal

from finetune.commands.console import show_table


def test_a_table_has_the_width_of_a_terminal_and_none_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("word " * 40, "1,000"), ("[/]", "1")]
    show_table(("text", "count"), rows, numbers=("count",))
    header, first, second = capsys.readouterr().out.splitlines()
    assert len(header) == len(first) == len(second) == 200 + 2 + 5
    assert second.startswith("[/] ")
    assert second.endswith("      1")
    with terminal(monkeypatch, "stdout") as shown:
        show_table(("text", "count"), rows, numbers=("count",))
    assert len(shown.getvalue().splitlines()) == 3 + 2


def test_a_terminal_folds_texts_and_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = ("workload", "phase", "A, cpu", "A, cuda", "B, cpu", "B, cuda", "B / A")
    row = ("classifier, 512 tokens, batch 366, found on cuda", "training", *["1,576,238"] * 5)
    monkeypatch.setenv("NO_COLOR", "1")
    for width in (80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        with terminal(monkeypatch, "stdout") as shown:
            show_table(titles, [row], numbers=titles[2:])
        widths = {
            len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in shown.getvalue().splitlines()
        }
        assert max(widths) <= max(width, 12 + 8 + 5 * 9 + 6 * 2)
        assert shown.getvalue().count("1,576,238") == 5
