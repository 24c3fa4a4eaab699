"""Several trainings of one configuration, which differ in their seed: their results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from finetune.evaluation.statistics import Interval, mean_interval
from finetune.runs.folder import SeedsFolder, seed_name
from finetune.runs.results import RunResults, best_of, read_results

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SeedResults:
    """What the finished runs of several seeds have found; the best by validation, if known."""

    runs: Mapping[int, RunResults]
    seeds: Sequence[int]
    best_seed: int | None
    output_dir: str

    @property
    def test(self) -> dict[str, Interval]:
        """Mean of each test metric, with its 95% interval; empty for fewer than two runs."""
        metrics = [run.test.metrics for run in self.runs.values()]
        if len(metrics) < 2:
            return {}
        return {name: mean_interval([one[name] for one in metrics]) for name in metrics[0]}

    @classmethod
    def read(
        cls, folder: SeedsFolder, seeds: Sequence[int], *, metric: str | None
    ) -> "SeedResults":
        """Read what the finished runs have found; the best is that by a metric."""
        finished = [seed for seed in seeds if folder.run(seed).has_finished]
        runs = {seed: read_results(folder.run(seed)) for seed in finished}
        return cls(runs, seeds, best_of(runs, metric), str(folder.path))

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``seeds.json``."""
        runs = {
            seed_name(seed): {
                "eval": run.validation and run.validation.metrics,
                "test": run.test.metrics,
            }
            for seed, run in self.runs.items()
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "seeds": list(self.seeds),
            "best": None if self.best_seed is None else seed_name(self.best_seed),
            "test": {name: asdict(one) for name, one in self.test.items()},
            "runs": runs,
        }
