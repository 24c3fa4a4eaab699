from dataclasses import replace

from batch_finder.simulated_machines import fits

from finetune.batch_finder.results import BatchResult, EstimateResult, FoundBatches

RESULT = BatchResult(
    device="cpu", mode="head", padded_length=48, precision="fp32", stores_features=True,
    budget_bytes=1000, max_verified=8, first_failed=9, predicted_maximum=None, recommended=6,
    fastest=7, features_batch=5, peak_bytes=900,
    trials=(fits(5, part="features"), fits(8, part="trainable", peak_bytes=900)),
    seconds=2.5,
)  # fmt: skip
ESTIMATE = EstimateResult(
    machine="m1-8gb", device="mps", mode="full", padded_length=512, precision="fp32",
    stores_features=False, budget_bytes=1000, batch=3, lowest_batch=2, highest_batch=4,
    features_batch=None, peak_bytes=900, basis="measurements",
)  # fmt: skip


def test_the_json_of_a_search_keeps_the_names_that_it_has_always_had() -> None:
    found = FoundBatches(results=(RESULT, replace(RESULT, trials=())))
    assert found.to_json() == {
        "schema_version": 1,
        "results": [
            {
                "device": "cpu", "mode": "head", "max_length": 48, "precision": "fp32",
                "stores_features": True, "budget_bytes": 1000, "max_verified": 8,
                "first_failed": 9, "predicted_maximum": None, "recommended": 6, "fastest": 7,
                "prefix_batch": 5, "peak_bytes": 900, "probes": probes, "seconds": 2.5,
            }
            for probes in (
                [
                    {"part": "prefix", "batch": 5, "outcome": "fits", "peak_bytes": None,
                     "examples_per_second": 100.0, "seconds": 1.0, "reason": ""},
                    {"part": "suffix", "batch": 8, "outcome": "fits", "peak_bytes": 900,
                     "examples_per_second": 100.0, "seconds": 1.0, "reason": ""},
                ],
                [],
            )
        ],
    }  # fmt: skip


def test_the_json_of_an_estimate_keeps_the_names_that_it_has_always_had() -> None:
    assert FoundBatches(estimates=(ESTIMATE,)).to_json() == {
        "schema_version": 1,
        "estimates": [
            {
                "machine": "m1-8gb", "device": "mps", "mode": "full", "max_length": 512,
                "precision": "fp32", "stores_features": False, "budget_bytes": 1000, "batch": 3,
                "lowest_batch": 2, "highest_batch": 4, "prefix_batch": None, "peak_bytes": 900,
                "basis": "measurements",
            }
        ],
    }  # fmt: skip
