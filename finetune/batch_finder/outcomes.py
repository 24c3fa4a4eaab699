"""The outcomes of the probes so far, and what follows from them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from finetune import events
from finetune.batch_finder.memory_model import fit_memory

# A probe takes two or three steps and an evaluation: no more than so many steps' time.
UPDATES_A_PROBE = 4
# Where memory is swapped instead of refused, a size whose speed is less than this share of a
# smaller one's is too big.
CLIFF_SHARE = 0.5

Verdict = Literal["fits", "too_big", "timed_out", "failed"]


@dataclass(frozen=True)
class Outcome(events.Probe):
    """What one probe found.

    Args:
        verdict: Whether it fits; ``failed`` says that something other than memory went wrong.
        is_strained: Whether it barely fits: the allocator had to free its cache and try again, or
            the system began to swap.
    """

    verdict: Verdict
    is_strained: bool = False


Probe = Callable[[int], Outcome]


@dataclass
class History:
    """The bounds of a search and its outcomes, and what follows from them.

    Args:
        budget_bytes: Memory that a batch may use.
        limit: Largest size worth trying, from 1.
        first: Size to begin with, in 1..limit; None for a small one. Where the device slows down,
            the search begins with one example in any case: only the speed of a size that is not
            swapped shows that another one is.
        time_limit_seconds: Time for all probes. None is begun that would probably end later,
            except those without which there is no result.
        slows_down: Whether the device swaps rather than refuse memory, so that a size which strains
            it, or is less than half as fast as a smaller one, is too big.
        outcomes: In the order of the probes.
        checked_sizes: Sizes that were probed in a fresh process.
    """

    budget_bytes: int
    limit: int
    first: int | None
    time_limit_seconds: float
    slows_down: bool
    outcomes: list[Outcome] = field(default_factory=list)
    checked_sizes: set[int] = field(default_factory=set)

    def add(self, outcome: Outcome, *, is_fresh: bool) -> None:
        """Add an outcome, and judge the speed of the earlier ones by it."""
        self.outcomes.append(outcome)
        if self.slows_down:
            self.outcomes = [self._judge_speed(each) for each in self.outcomes]
        if is_fresh:
            self.checked_sizes.add(outcome.batch_size)

    @property
    def seconds_left(self) -> float:
        return self.time_limit_seconds - sum(outcome.seconds for outcome in self.outcomes)

    @property
    def passed(self) -> dict[int, Outcome]:
        """The last outcome of each size that has never failed, by ascending size."""
        sizes = self.sizes("fits") - self.sizes("too_big") - self.sizes("timed_out")
        outcomes = {each.batch_size: each for each in self.outcomes}
        return {size: outcomes[size] for size in sorted(sizes)}

    @property
    def speeds(self) -> dict[int, float]:
        """Examples per second of the sizes that passed."""
        return {size: one.examples_per_second or 0.0 for size, one in self.passed.items()}

    @property
    def largest(self) -> int:
        """The largest size that passed, 0 if none did."""
        return max(self.passed, default=0)

    @property
    def bound(self) -> int | None:
        """The smallest size that failed for memory, above the largest that passed."""
        return min((size for size in self.sizes("too_big") if size > self.largest), default=None)

    def sizes(self, verdict: Verdict) -> set[int]:
        """Return the sizes that got a verdict at least once."""
        return {each.batch_size for each in self.outcomes if each.verdict == verdict}

    def predict_largest(self, *, budget_share: float = 1.0) -> int | None:
        """Predict the largest size within a share of the budget; None while no slope is known."""
        # The allocator of a strained device has freed what it could: such a peak is too low.
        peaks = {
            size: outcome.peak_bytes
            for size, outcome in self.passed.items()
            if outcome.peak_bytes and not outcome.is_strained
        }
        return fit_memory(peaks).largest_batch(budget_share * self.budget_bytes) if peaks else None

    def affordable_size(self, seconds: float) -> int:
        """Predict the largest size whose probe ends in time; at most half of one that did not.

        The time is predicted from above, as if a step had no fixed part.
        """
        if not self.passed:
            return self.limit
        seconds_per_example = UPDATES_A_PROBE / self.speeds[self.largest]
        seconds -= self.passed[self.largest].seconds
        too_slow = min(self.sizes("timed_out"), default=2 * self.limit)
        return math.floor(min(self.largest + seconds / seconds_per_example, too_slow / 2))

    def _judge_speed(self, outcome: Outcome) -> Outcome:
        """Call a size too big that passed, but only because the system swapped."""
        if outcome.verdict != "fits":
            return outcome
        if outcome.is_strained:
            return replace(outcome, verdict="too_big", reason="the system began to swap")
        smaller = [each for each in self.outcomes if each.batch_size < outcome.batch_size]
        best = max((each.examples_per_second or 0.0 for each in smaller), default=0.0)
        speed = outcome.examples_per_second or 0.0
        if speed >= CLIFF_SHARE * best:
            return outcome
        reason = f"it has {speed / best:.0%} of the speed of a smaller batch"
        return replace(outcome, verdict="too_big", reason=reason)
