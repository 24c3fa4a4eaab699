from bench.simulated_devices import a_workload

from finetune.bench.estimate import estimate_seconds
from finetune.bench.timer import QUICK


def test_an_estimate_grows_with_the_work_and_ends_with_the_effort() -> None:
    def estimate(gigaflops: float) -> float:
        workload = a_workload(rows=2, gigaflops=gigaflops)
        return estimate_seconds(workload, gigaflops_a_second=100.0, effort=QUICK)

    assert estimate(1.0) < estimate(20.0) <= estimate(1e9) < 10
