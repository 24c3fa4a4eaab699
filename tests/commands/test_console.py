import re
from dataclasses import replace

import pytest
from commands.test_progress import terminal
from rich.cells import cell_len

from finetune.commands.console import shorten, show_scores, show_table
from finetune.tasks.scores import ClassScores, Scores

ROW = ClassScores(precision=0.5, recall=1.0, f1=2 / 3, support=12)


def scores(**per_class: ClassScores) -> Scores:
    samples = sum(one.support for one in per_class.values())
    metrics = {"accuracy": 0.9, "macro_f1": 0.8, "loss": 1.0}
    return Scores(samples, metrics, {"accuracy": 0.75}, per_class, confusion_matrix=[])


def test_metrics_are_shown_overall_and_by_class(capsys: pytest.CaptureFixture[str]) -> None:
    long_name = "x" * 300
    show_scores("the test", scores(NUM=ROW, **{long_name: replace(ROW, support=4)}))
    *metrics, _, header, line, last = capsys.readouterr().out.strip().splitlines()
    assert metrics == ["the test", "  accuracy 90.0%, macro F1 80.0%"]
    assert header.split() == [*("class", "precision", "recall", "95%", "interval", "F1", "rows")]
    assert line.split() == [*("NUM", "50.0%", "100.0%", "75.8–100.0%", "66.7%", "12")]
    assert last.startswith("x" * 59 + "… ")


def test_a_class_may_look_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_scores("[red]x[/]", scores(**{"[bold]": ROW, ":a:": ROW}))
    output = capsys.readouterr().out
    assert "[red]x[/]\n  accuracy 90.0%" in output
    assert "[bold]" in output
    assert ":a:" in output


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


def test_wide_joined_and_hostile_characters_do_not_move_the_next_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = ["plain", "日本語", "👩🏽‍🚀 🇨🇭 ❤️", "שלום عليكم", "a\x1b[2J\u202eb\nc", "e\u0301"]
    show_table(("class", "rows"), [(text, "12") for text in texts], numbers=("rows",))
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(texts)
    assert len({cell_len(line.removesuffix("12")) for line in lines}) == 1


@pytest.mark.parametrize(
    ("text", "shown"), [("a\n b", "a b"), ("x" * 60, "x" * 60), ("x" * 61, "x" * 59 + "…")]
)
def test_an_example_is_one_short_line(text: str, shown: str) -> None:
    assert shorten(text) == shown
