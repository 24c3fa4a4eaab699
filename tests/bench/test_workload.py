from bench.simulated_devices import a_workload

from finetune.bench.workload import QUICK


def test_an_estimate_grows_with_the_work_up_to_the_longest_step_or_a_single_row() -> None:
    def estimate(gigaflops: float, *, rows: int = 1000) -> float:
        workload = a_workload(rows=rows, gigaflops=gigaflops)
        return workload.estimate_seconds(gigaflops_a_second=100.0, effort=QUICK)

    assert estimate(1e-4) < estimate(5e-3) < estimate(1.0) == estimate(2.0) < 2
    assert estimate(1e3) == estimate(1e3, rows=1) > 60
