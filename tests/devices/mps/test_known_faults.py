from pathlib import Path

import pytest
import torch

import finetune
from finetune.devices.mps.known_faults import known_faults, named_arguments

TORCH = "2.13.0"
ATTENTION = "_scaled_dot_product_attention_math_for_mps"
HALF = torch.bfloat16
LONG_SUM = "pytorch#177116, #195163"


def faults_met(
    name: str,
    *,
    torch_version: str = TORCH,
    macos: str = "",
    chip: int | None = None,
    **arguments: object,
) -> list[str]:
    """Return the reports of those faults that a call meets."""
    faults = known_faults(torch_version=torch_version, macos=macos, chip=chip)
    return [fault.source for fault in faults if fault.hits(f"aten::{name}", arguments)]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of any size that takes no memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_arguments_have_the_names_of_the_schema() -> None:
    tensor = torch.zeros(2, 3, 4)
    bmm = torch.ops.aten.bmm.default
    arguments = named_arguments(bmm, (tensor,), {"mat2": tensor})
    assert arguments == {"self": tensor, "mat2": tensor}


@pytest.mark.parametrize(
    ("torch_version", "tokens", "head_size", "sources"),
    [
        ("2.11.0", 8, 64, ["pytorch#181133", "pytorch#169222", "pytorch#182285, #184180"]),
        ("2.12.0+cpu", 8, 64, ["pytorch#169222", "pytorch#182285, #184180"]),
        (TORCH, 8, 64, ["pytorch#169222"]),
        ("2.11.0", 9, 64, []),
        ("2.11.0", 8, 32, []),
    ],
)
def test_attention_over_few_tokens_has_faults(
    torch_version: str, tokens: int, head_size: int, sources: list[str]
) -> None:
    query = torch.zeros(2, tokens, 3, head_size).permute(0, 2, 1, 3)
    mask = torch.zeros(2, 1, tokens, tokens)
    call = {"query": query, "key": query, "value": query, "attn_mask": mask}
    assert faults_met(ATTENTION, torch_version=torch_version, **call) == sources


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mm", {"self": empty(16, 32_767), "mat2": empty(32_767, 16)}),
        ("addmm", {"self": empty(16), "mat1": empty(16, 32_767), "mat2": empty(32_767, 16)}),
        ("bmm", {"self": empty(1, 16, 32_767), "mat2": empty(1, 32_767, 16)}),
        ("linear", {"input": empty(2, 8, 32_767), "weight": empty(16, 32_767)}),
        (
            "linear_backward",
            {"self": empty(16, 16), "grad_output": empty(16, 32_767), "weight": empty(32_767, 16)},
        ),
    ],
)
def test_every_product_with_long_sums_is_wrong(name: str, call: dict[str, object]) -> None:
    assert faults_met(name, torch_version="2.14.0", **call) == [LONG_SUM]


@pytest.mark.parametrize(("torch_version", "is_wrong"), [(TORCH, True), ("2.14.0", False)])
@pytest.mark.parametrize(
    ("shape", "source"),
    [
        # One vector per example, on M1 with macOS 26.
        ((8, 1, 768), "pytorch#188438"),
        ((1, 768), "pytorch#188438"),
        ((8, 768), None),
        ((768,), None),
        ((65_537, 2, 64), "pytorch#189495"),
        ((65_536, 2, 64), None),
        ((65_537, 64), None),
    ],
)
def test_a_linear_layer_with_bias_was_wrong_for_some_inputs_before_2_14(
    shape: tuple[int, ...], source: str | None, torch_version: str, is_wrong: bool
) -> None:
    call = {"input": empty(*shape), "weight": empty(6, shape[-1]), "bias": empty(6)}
    expected = [source] if source and is_wrong else []
    assert faults_met("linear", torch_version=torch_version, **call) == expected


def test_products_of_expanded_tensors_had_rows_of_zeros() -> None:
    matrix = empty(3, 4)
    expanded = {"self": empty(1, 3).expand(5, 3), "mat2": matrix}
    assert faults_met("mm", torch_version="2.12.0", **expanded) == ["pytorch#180201"]
    assert faults_met("mm", **expanded) == []
    # One row has no other.
    assert faults_met("mm", torch_version="2.12.0", self=empty(1, 3), mat2=matrix) == []


def test_product_of_very_many_elements_is_wrong() -> None:
    left, right = empty(65537, 256, 64), empty(65537, 64, 256)
    assert faults_met("bmm", self=left, mat2=right) == ["pytorch#197636"]
    assert faults_met("bmm", self=left[1:], mat2=right[1:]) == []


@pytest.mark.parametrize(
    ("name", "met", "unmet", "source"),
    [
        (
            "_fused_adamw_",
            {"self": [], "found_inf": torch.ones(())},
            {"self": []},
            "pytorch#186360",
        ),
        (
            "_amp_foreach_non_finite_check_and_unscale_",
            {"self": [empty(2), empty(2, dtype=HALF)]},
            {"self": [empty(2)]},
            "pytorch#184286",
        ),
        (
            "native_layer_norm_backward",
            {"output_mask": [False, True, True]},
            {"output_mask": [True, True, True]},
            "pytorch#183825",
        ),
        (
            "native_layer_norm_backward",
            {"output_mask": [False, False, True]},
            {"output_mask": [False, False, False]},
            "pytorch#183825",
        ),
    ],
)
def test_faults_that_2_13_has_fixed(
    name: str, met: dict[str, object], unmet: dict[str, object], source: str
) -> None:
    assert faults_met(name, torch_version="2.12.1", **met) == [source]
    assert faults_met(name, torch_version="2.12.1", **unmet) == []
    assert faults_met(name, **met) == []


ROWS = empty(2, 3, 4, dtype=HALF)
TRANSPOSED = empty(4, 5, dtype=HALF).T
FIVE = empty(2, 1, 2, 1, 4)


@pytest.mark.parametrize(
    ("name", "met", "unmet", "source"),
    [
        (
            "linear",
            {"input": ROWS, "weight": TRANSPOSED, "bias": empty(5)},
            {"input": ROWS, "weight": TRANSPOSED.contiguous(), "bias": empty(5)},
            "pytorch#197796",
        ),
        (
            "linear",
            {"input": ROWS[:, :1], "weight": empty(5, 4, dtype=HALF)},
            {"input": ROWS[:, 0], "weight": empty(5, 4, dtype=HALF)},
            "pytorch#189847, #189855",
        ),
        (
            "linear_backward",
            {"self": FIVE, "grad_output": FIVE, "weight": empty(4, 4)},
            {"self": FIVE[0], "grad_output": FIVE[0], "weight": empty(4, 4)},
            "pytorch#187201, #187379",
        ),
    ],
)
def test_faults_that_2_14_has_fixed(
    name: str, met: dict[str, object], unmet: dict[str, object], source: str
) -> None:
    assert source in faults_met(name, **met)
    assert source not in faults_met(name, **unmet)
    assert source not in faults_met(name, torch_version="2.14.0", **met)


def test_a_fault_of_some_chips_or_systems_spares_other_macs() -> None:
    sources = {
        (macos, chip): {
            fault.source for fault in known_faults(torch_version=TORCH, macos=macos, chip=chip)
        }
        for macos, chip in (("27.0", 5), ("26.3", 5), ("26.3", 1), ("", None))
    }
    assert "pytorch#197796" in sources["27.0", 5]
    assert "pytorch#197796" not in sources["26.3", 5]
    assert LONG_SUM in sources["26.3", 1]
    assert LONG_SUM not in sources["26.3", 5]
    # Of an unknown Mac, all are told.
    assert set.union(*sources.values()) == sources["", None]


def test_metal_is_slow_where_the_environment_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"self": empty(2, 3), "mat2": empty(3, 2)}
    assert faults_met("mm", **call) == []
    monkeypatch.setenv("PYTORCH_MPS_PREFER_METAL", "1")
    assert faults_met("mm", **call) == ["pytorch#198182, open"]


def test_fused_adamw_refuses_weights_in_16_bits() -> None:
    assert faults_met("_fused_adamw_", self=[empty(2, dtype=HALF)]) == ["Soup PR 564"]
    assert faults_met("_fused_adamw_", self=[empty(2)]) == []


def test_no_copy_of_the_package_is_asynchronous_but_those_to_cuda() -> None:
    """MPS may read memory that is free already (pytorch#189690)."""
    package = Path(finetune.__file__).parent
    found = [path for path in package.rglob("*.py") if "non_blocking" in path.read_text()]
    assert found == [package / "devices" / "cuda.py"]
