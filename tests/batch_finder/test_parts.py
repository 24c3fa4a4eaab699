from dataclasses import replace
from pathlib import Path

import pytest
from batch_finder.simulated_machines import GIB, SimulatedMachine, SimulatedProber, hinge, prober
from tiny_models import tiny_case

from finetune import events
from finetune.batch_finder import parts
from finetune.batch_finder.case import Case
from finetune.batch_finder.estimate import EstimatedSizes
from finetune.batch_finder.find import Bounds, Finder
from finetune.batch_finder.parts import estimate_parts, search_parts
from finetune.batch_finder.results import BatchResult
from finetune.config.mode import Mode
from finetune.devices.base import BatchShapes
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.chips import Mac
from finetune.events import Event

__all__ = ["prober"]
CASE = tiny_case(mode=Mode("head"))
BOUNDS = Bounds(limit=1000, first=None, memory_limit_bytes=None, time_limit_seconds=300.0)


def search(
    emitted: list[Event] | None = None,
    *,
    stores_features: bool = True,
    device: CpuDevice | None = None,
    cache: Path | None = None,
) -> BatchResult:
    emit = (emitted if emitted is not None else []).append
    finder = Finder(device or CpuDevice(), BOUNDS, cache, emit)
    return search_parts(CASE, finder, stores_features=stores_features)


def messages(emitted: list[Event]) -> list[str]:
    return [one.message for one in emitted if isinstance(one, events.Info | events.WarningMessage)]


def test_a_whole_model_has_one_search(prober: SimulatedProber) -> None:
    emitted: list[Event] = []
    result = search(emitted, stores_features=False)
    assert [case.part for case in prober.cases] == ["whole"]
    assert messages(emitted) == ["searching on cpu: head, 16 tokens"]
    assert (result.max_verified, result.first_failed, result.stores_features) == (125, 126, False)
    assert (result.features_batch, result.budget_bytes) == (None, 8 * GIB)
    assert result.peak_bytes == SimulatedMachine().peak_bytes(125)
    assert (result.device, result.mode, result.padded_length) == ("cpu", "head", 16)


def test_each_probe_is_an_event_and_part_of_the_result(prober: SimulatedProber) -> None:
    emitted: list[Event] = []
    result = search(emitted)
    probes = [one for one in emitted if isinstance(one, events.Probe)]
    assert [one.batch_size for one in probes] == [one.outcome.batch_size for one in result.probes]
    assert [one.verdict for one in probes] == [one.outcome.verdict for one in result.probes]
    assert {"fits", "too_big"} == {one.verdict for one in probes}
    assert result.seconds > 0


def test_where_features_are_stored_their_extraction_has_its_own_batch_size(
    prober: SimulatedProber, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = {
        "features": SimulatedMachine(),
        "trainable": SimulatedMachine(peak_bytes=hinge(floor=100, base=90, row=30)),
    }
    monkeypatch.setattr(prober, "probe", lambda size: machines[prober.cases[-1].part].probe(size))
    emitted: list[Event] = []
    result = search(emitted)
    assert [one for one in messages(emitted) if "searching" in one] == [
        "searching on cpu: head, feature extraction, 16 tokens",
        "searching on cpu: head, trainable layers, 16 tokens",
    ]
    assert result.stores_features
    assert result.features_batch is not None
    assert result.features_batch <= 125 < result.max_verified
    assert {one.part for one in result.probes} == {"features", "trainable"}
    # The larger of both peaks; that of the extraction is not the last.
    assert result.peak_bytes == max(
        one.outcome.peak_bytes or 0 for one in result.probes if one.outcome.verdict == "fits"
    )


@pytest.mark.parametrize("too_large", ["features", "trainable"])
def test_where_one_part_does_not_fit_nothing_does(
    too_large: str, prober: SimulatedProber, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(SimulatedMachine(), capacity_share=0.001)
    monkeypatch.setattr(
        prober,
        "probe",
        lambda size: (tiny if prober.cases[-1].part == too_large else prober.machine).probe(size),
    )
    emitted: list[Event] = []
    result = search(emitted)
    assert (result.max_verified, result.recommended, result.fastest) == (0, 0, 0)
    assert (result.first_failed, result.peak_bytes) == (1, None)
    assert (result.features_batch is None) == (too_large == "features")
    assert any("not even a batch of one example fits" in one for one in messages(emitted))


def test_a_model_that_can_not_be_split_is_searched_as_a_whole(prober: SimulatedProber) -> None:
    prober.can_split = False
    emitted: list[Event] = []
    result = search(emitted)
    assert [case.part for case in prober.cases] == ["features", "whole"]
    assert (result.max_verified, result.stores_features, result.features_batch) == (
        125, False, None,
    )  # fmt: skip
    [warning] = [one for one in emitted if isinstance(one, events.WarningMessage)]
    assert "can't be split off: the whole model runs at every step" in warning.message


def test_no_size_is_tried_that_the_device_computes_wrongly(prober: SimulatedProber) -> None:
    device = CpuDevice()
    device.shapes = BatchShapes(max_tokens=16 * 50 + 15)  # type: ignore[misc]
    result = search(device=device, stores_features=False)
    assert (result.max_verified, result.first_failed) == (50, None)


def test_an_estimate_joins_those_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac("Mac with 4GiB", 4 * GIB)
    batches = {"features": 30, "trainable": 20, "whole": 10}

    def estimate(case: Case, *, memory_bytes: int, limit: int) -> EstimatedSizes:
        assert (memory_bytes, limit) == (mac.budget_bytes, 99)
        batch = batches[case.part]
        return EstimatedSizes(batch=batch, lowest_batch=batch - 1, highest_batch=batch + 1,
                        basis=case.part, peak_bytes=100 * batch)  # fmt: skip

    monkeypatch.setattr(parts, "estimate", estimate)
    case = replace(CASE, device="mps")
    split = estimate_parts(case, mac, stores_features=True, limit=99)
    assert (split.features_batch, split.peak_bytes, split.stores_features) == (30, 3000, True)
    assert (split.lowest_batch, split.batch, split.highest_batch) == (19, 20, 21)
    assert (split.machine, split.device, split.mode) == ("Mac with 4GiB", "mps", "head")
    assert (split.basis, split.budget_bytes) == ("trainable", mac.budget_bytes)
    unsplit = estimate_parts(case, mac, stores_features=False, limit=99)
    assert (unsplit.features_batch, unsplit.peak_bytes, unsplit.stores_features) == (
        None, 1000, False,
    )  # fmt: skip
    assert (unsplit.lowest_batch, unsplit.batch, unsplit.highest_batch) == (9, 10, 11)
