from dataclasses import replace

from bench.example_results import a_row, example_results

from finetune.bench.tables import compare, first_faster, tabulate


def test_each_group_has_a_table_and_what_was_published_is_apart_with_its_source() -> None:
    tables = tabulate(example_results())
    assert [(table.group, bool(table.source)) for table in tables] == [
        *(("inference", False), ("inference", True), ("training", False), ("training", True)),
        ("apple", False),
    ]
    inference = tables[0]
    assert inference.columns[:5] == ("workload", "phase", "rows", "cpu, ms a step", "cpu, rows/s")
    assert inference.rows[0][3:] == ("10 (9–12)", "100", "20 (18–24)", "50", "0.50")
    assert tables[3].rows[0] == ("full", "CPU", "32", "0.69", "24 min 13 s")


def test_remarks_say_where_a_device_is_faster_and_what_failed() -> None:
    inference, _, training, *_ = tabulate(example_results())
    assert inference.remarks == ("gpu is faster than the CPU from batch 8 on",)
    assert training.remarks[0] == "full, 512 tokens, batch 32, training, gpu: out of memory"
    article = training.rows[0]
    assert article[5:] == ("-", "-", "16.67", "-", "-")


def test_a_device_is_faster_from_where_no_larger_workload_is_slower() -> None:
    seconds = {"1": (1, 0.5), "2": (1, 2), "4": (1, 0.5), "8": (1, 0.5), "16": (1, 0.0)}
    rows = [
        a_row("mlp", name, device, one)
        for name, pair in seconds.items()
        for device, one in zip(("cpu", "gpu"), pair, strict=True)
    ]
    assert first_faster(rows, "gpu") == "4"
    assert first_faster(rows[:4], "gpu") is None


def test_nothing_is_said_of_a_device_that_was_never_timed() -> None:
    rows = [a_row("mlp", "small", "cpu", 1.0), a_row("mlp", "small", "gpu", 0.0, note="lost")]
    [table] = tabulate(replace(example_results(), rows=tuple(rows)))
    assert table.remarks == ("small, training, gpu: lost",)


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


def test_two_runs_on_one_machine_say_how_many_timings_are_close() -> None:
    one = replace(
        example_results(), rows=(a_row("mlp", "a", "cpu", 1.0), a_row("mlp", "b", "cpu", 1.0))
    )
    for factor, close in ((1.05, 2), (1.25, 1)):
        again = replace(one, rows=(a_row("mlp", "a", "cpu", factor), one.rows[1]))
        remark = compare(one, again).remarks[1]
        assert remark == f"on one machine, {close} of 2 are within 10% of each other"
