"""Temperature scaling: dividing the logits by one number calibrates the probabilities.

Guo et al., On Calibration of Modern Neural Networks, ICML 2017 (arXiv 1706.04599), section 4.2.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.events import Emit, Info

if TYPE_CHECKING:
    import torch

# A parameter fitted on n rows costs 1 / 2n nats a row: at 100 rows, less than most models gain.
# With hardly any mistakes the fitted temperature is near 0 (tests/tasks/test_temperature).
MIN_ROWS = 100
MIN_MISTAKES = 5
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0


def fit_temperature(
    losses: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]",
    logits: NDArray[np.float32],
    labels: NDArray[Any],
    *,
    mistakes: int,
    emit: Emit,
) -> float:
    """Return the temperature with the lowest mean loss; 1 if there are too few rows or mistakes."""
    if len(labels) < MIN_ROWS or mistakes < MIN_MISTAKES:
        needed = f"it needs {MIN_ROWS} validation rows and {MIN_MISTAKES} mistakes"
        found = f"there are {len(labels):,} and {mistakes:,}"
        emit(Info(f"calibration skipped: {needed}, {found}"))
        return 1.0
    import torch
    from scipy.optimize import minimize_scalar

    outputs, true = torch.tensor(logits, dtype=torch.float64), torch.tensor(labels)

    def mean_loss(log_temperature: float) -> float:
        return losses(outputs / np.exp(log_temperature), true).mean().item()

    bounds = (np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE))
    # The loss is convex in 1 / temperature, so that there is one minimum.
    minimum = minimize_scalar(mean_loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(minimum.x))


def scale_parameters(
    parameters: "Sequence[torch.nn.Parameter]", factor: float, *, shift: float = 0.0
) -> None:
    """Multiply weight and bias of the output layer, in place, and shift the bias."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)
            if parameter.ndim == 1:
                parameter.add_(shift)


def describe_calibration(temperature: float) -> str:
    """Return a sentence on how far the probabilities can be trusted."""
    if temperature == 1:
        return "The probabilities are not calibrated."
    return (
        f"The probabilities are calibrated on the validation split, with temperature "
        f"{temperature:.3g}; for texts unlike those they may be too high or too low."
    )
