import pytest

from finetune.evaluation.baseline import baseline_accuracy, warn_unless_better
from finetune.events import Event, WarningMessage


def test_the_baseline_is_the_share_of_the_largest_true_class() -> None:
    assert baseline_accuracy([[1, 5, 1], [0, 2, 0], [1, 0, 0]]) == 0.7


@pytest.mark.parametrize(("accuracy", "warns"), [(0.69, True), (0.7, True), (0.71, False)])
def test_a_model_that_does_not_beat_the_baseline_is_reported(accuracy: float, warns: bool) -> None:
    events: list[Event] = []
    warn_unless_better(accuracy, [[3, 4], [3, 0]], emit=events.append)
    assert len(events) == warns
    for event in events:
        assert isinstance(event, WarningMessage)
        assert f"accuracy {accuracy:.1%}" in event.message
        assert "70.0%" in event.message
