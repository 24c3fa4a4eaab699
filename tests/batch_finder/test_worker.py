import pytest
from tiny_models import tiny_case

from finetune.batch_finder.child import Child


@pytest.mark.slow
def test_a_worker_takes_its_budget_trains_and_names_the_class_of_an_error() -> None:
    child = Child("finetune.batch_finder.worker")
    try:
        child.send({"case": tiny_case().to_json(), "limit_bytes": 2**31, "budget_bytes": 2**30})
        assert child.receive(seconds=60) == {"budget_bytes": 2**30}
        assert child.receive(seconds=60) == {"ready": True}
        child.send(2)
        measurement = child.receive(seconds=60)["measurement"]
        assert measurement["examples_per_second"] > 0
        child.send("two")
        failure = child.receive(seconds=60)
        assert failure["is_out_of_memory"] is False
        assert "TypeError" in failure["failure"]
    finally:
        child.kill()
