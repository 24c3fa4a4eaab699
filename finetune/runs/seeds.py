"""Several trainings of one configuration, which differ in their seed: their folder and results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune.config.schema import Config
from finetune.evaluation.statistics import Interval, mean_interval
from finetune.files import write_json
from finetune.runs.folder import RunFolder, read_seeds, seed_name, seeds_file
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


@dataclass(frozen=True)
class SeedsFolder:
    """The folder of several runs, ``seed-42`` and so on, and of ``seeds.json``."""

    path: Path

    def run(self, seed: int) -> RunFolder:
        """Return the folder of one run."""
        return RunFolder(self.path / seed_name(seed))

    def first_begun(self) -> RunFolder | None:
        """Return the first run that has a configuration."""
        runs = map(self.run, read_seeds(self.path))
        return next((one for one in runs if one.config_file.is_file()), None)

    def load_config(self) -> Config | None:
        """Return the configuration of the first seed; None if no run has begun."""
        if (begun := self.first_begun()) is None:
            return None
        config = begun.read_config()
        # The folder of the first may be gone.
        first = read_seeds(self.path)[0]
        return replace(config, training=replace(config.training, seed=first))

    def has_finished(self, count: int) -> bool:
        """Return whether its runs are so many, or more, and have all finished."""
        seeds = read_seeds(self.path)
        return len(seeds) >= count and all(self.run(seed).has_finished for seed in seeds)

    def read(self, seeds: Sequence[int], *, metric: str | None) -> SeedResults:
        """Return what the finished runs of some seeds have found, and the best by a metric."""
        finished = [seed for seed in seeds if self.run(seed).has_finished]
        runs = {seed: read_results(self.run(seed)) for seed in finished}
        return SeedResults(runs, seeds, best_of(runs, metric), str(self.path))

    def write(self, results: SeedResults) -> None:
        """Write ``seeds.json``."""
        write_json(seeds_file(self.path), results.to_json())
