from dataclasses import replace

from bench.example_results import a_row, example_results

from finetune.bench.compare import compare


def test_two_machines_stand_side_by_side() -> None:
    table = compare(example_results(), example_results(gpu="other", factor=0.5))
    assert table.columns[2:] == ("A, cpu", "A, gpu", "B, cpu", "B, other", "B ÷ A")
    assert len(table.remarks) == 1
    assert table.rows[0] == ("inference: batch 1", "evaluation", "100", "50", "200", "100", "2.00")
    assert table.rows[3] == ("training: full, 512 tokens, batch 32", "training",
                             "1", "-", "1", "-", "1.00")  # fmt: skip


def test_two_machines_of_which_one_was_quick_are_compared_with_a_remark() -> None:
    quick = replace(example_results(gpu="other"), is_quick=True)
    assert "B is of a quick bench" in compare(example_results(), quick).remarks[1]


def test_two_runs_on_one_machine_say_which_medians_differ_and_whether_their_ranges_meet() -> None:
    one = replace(
        example_results(), rows=(a_row("mlp", "a", "cpu", 1.0), a_row("mlp", "b", "cpu", 1.0))
    )
    for factor, words in (
        (1.05, []),
        (1.25, ["a, training, cpu: 6.67–8.89 and 5.33–7.11 rows/s, ranges that meet"]),
        (1.50, ["a, training, cpu: 6.67–8.89 and 4.44–5.93 rows/s, ranges that do not meet"]),
    ):
        again = replace(one, rows=(a_row("mlp", "a", "cpu", factor), one.rows[1]))
        _, within, *apart = compare(one, again).remarks
        assert within.startswith(f"of 2 timings on the same devices {2 - len(words)} have medians")
        assert apart == [f"mlp, {line}" for line in words]
