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
