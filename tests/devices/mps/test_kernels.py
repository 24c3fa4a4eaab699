from importlib import resources

import pytest
import torch

from finetune.devices.mps.kernels import known_faults, status_of

TORCH = "2.13.0"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("aten::addmm", "native"),  # by its structured variant, addmm.out
        ("aten::gelu_backward", "native"),  # by gelu_backward.grad_input
        ("aten::linear", "native"),  # also a composite elsewhere
        ("aten::_fused_adamw_", "native"),
        ("aten::embedding", "composite"),  # explicit
        ("aten::dropout", "composite"),  # implicit: without a list of kernels
        ("aten::native_dropout.out", "composite"),  # generated
        ("aten::take", "missing"),
        ("aten::linalg_eig", "missing"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "missing"),
        ("torchvision::nms", "missing"),
    ],
)
def test_status_follows_the_list_that_pytorch_is_made_from(name: str, status: str) -> None:
    assert status_of(name) == status


def test_structured_operator_without_a_kernel_is_missing_in_all_its_variants() -> None:
    assert {status_of(f"aten::heaviside{suffix}") for suffix in ("", "_", ".out")} == {"missing"}


def test_the_list_comes_with_the_installed_torch() -> None:
    listed = resources.files("torchgen") / "packaged" / "ATen" / "native" / "native_functions.yaml"
    assert listed.is_file()


def faults_met(name: str, *, torch_version: str = TORCH, **call: object) -> list[str]:
    """Return the reports of those faults that a call runs into."""
    faults = known_faults(name, torch_version=torch_version)
    return [fault.source for fault in faults if fault.is_met(call)]


@pytest.mark.parametrize(("torch_version", "sources"), [("2.3.1", ["pytorch#118115"]), (TORCH, [])])
def test_addcmul_in_place_was_wrong_before_2_4(torch_version: str, sources: list[str]) -> None:
    gaps = torch.zeros(3, 2).T
    assert faults_met("aten::addcmul_", self=gaps, torch_version=torch_version) == sources


def test_addcmul_in_place_was_always_right_without_gaps() -> None:
    assert faults_met("aten::addcmul_", self=torch.zeros(2, 3), torch_version="2.3.1") == []


@pytest.mark.parametrize(
    ("torch_version", "tokens", "sources"),
    [
        ("2.11.0", 8, ["pytorch#181133", "pytorch#169222"]),
        ("2.12.0", 8, ["pytorch#169222"]),
        ("2.11.0", 9, []),
        ("2.7.1", 9, ["pytorch#156707"]),
    ],
)
def test_attention_over_few_tokens_has_faults(
    torch_version: str, tokens: int, sources: list[str]
) -> None:
    query = torch.zeros(2, tokens, 3, 64).permute(0, 2, 1, 3)
    assert (
        faults_met(
            "aten::_scaled_dot_product_attention_math_for_mps",
            torch_version=torch_version,
            query=query,
            key=query,
            attn_mask=torch.zeros(2, 1, tokens, tokens),
        )
        == sources
    )


@pytest.mark.parametrize(("rows", "sources"), [(64, ["pytorch#177116"]), (63, [])])
def test_gradients_of_many_tokens_are_wrong(rows: int, sources: list[str]) -> None:
    inputs = torch.empty(rows, 512, 768, device="meta")
    weight = torch.empty(768, 768, device="meta")
    assert faults_met("aten::linear_backward", self=inputs, weight=weight) == sources


def test_gradients_of_many_tokens_are_right_from_2_14_on() -> None:
    inputs = torch.empty(64, 512, 768, device="meta")
    weight = torch.empty(768, 768, device="meta")
    name = "aten::linear_backward"
    assert faults_met(name, torch_version="2.14.0", self=inputs, weight=weight) == []


@pytest.mark.parametrize(
    ("torch_version", "sources"), [("2.11.0", ["pytorch#186360"]), (TORCH, [])]
)
def test_fused_adamw_did_not_skip_infinite_gradients(
    torch_version: str, sources: list[str]
) -> None:
    name = "aten::_fused_adamw_"
    assert faults_met(name, torch_version=torch_version, found_inf=torch.ones(())) == sources
    assert faults_met(name, torch_version=torch_version) == []


def test_product_of_very_many_elements_is_wrong() -> None:
    left = torch.empty(65537, 256, 64, device="meta")
    right = torch.empty(65537, 64, 256, device="meta")
    assert faults_met("aten::bmm", self=left, mat2=right) == ["pytorch#197636"]
    assert faults_met("aten::bmm", self=left[:9], mat2=right[:9]) == []


def test_local_build_of_a_release_has_its_faults() -> None:
    gaps = torch.zeros(3, 2).T
    assert faults_met("aten::addcdiv_", self=gaps, torch_version="2.3.1+cpu") == ["pytorch#118115"]
    assert faults_met("aten::addcdiv_", self=gaps, torch_version="2.4.0+cpu") == []
