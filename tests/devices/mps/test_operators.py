import pytest

from finetune.devices.mps.operators import status_of


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
        ("aten::mode", "missing"),
        ("aten::linalg_eig", "missing"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "missing"),
        ("torchvision::nms", "missing"),
    ],
)
def test_status_follows_the_list_that_pytorch_is_made_from(name: str, status: str) -> None:
    assert status_of(name) == status
