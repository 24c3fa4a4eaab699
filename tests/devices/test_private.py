"""What this package needs of PyTorch's private names; a failure names what a version changed."""

import pytest
import torch
from torch import nn

from finetune.devices import private


class Noting(private.TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that reach the dispatcher, and whether a backward pass called them."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, str | None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        node = private.current_autograd_node()
        self.noted[func.name()] = node and node.name()
        return func(*args, **(kwargs or {}))


def test_fake_tensors_have_shapes_and_no_values() -> None:
    layer = nn.Linear(3, 10**6)
    with private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with private.FakeCopyMode(mode):
            layer = nn.Linear(3, 10**9)
        assert layer(torch.ones(2, 3)).shape == (2, 10**9)
        for error, read in (
            (private.DataDependentOutputException, lambda: bool(torch.ones(1))),
            (private.DynamicOutputShapeException, lambda: torch.ones(2).nonzero()),
        ):
            with pytest.raises(error):
                read()


def test_a_dispatch_mode_sees_operators_and_the_node_of_a_backward_pass() -> None:
    weight = torch.ones(2, requires_grad=True)
    with Noting() as mode:
        weight.exp().sum().backward()
    assert mode.noted["aten::exp"] is None
    assert mode.noted["aten::mul.Tensor"] == "ExpBackward0"


def test_trees_of_containers_are_walked() -> None:
    tree = {"a": [1, (2,)], "b": "3"}
    assert list(private.tree_iter(tree)) == private.tree_leaves(tree) == [1, 2, "3"]
    assert private.tree_map(str, tree) == {"a": ["1", ("2",)], "b": "3"}
    assert private.tree_map_only(int, float, tree) == {"a": [1.0, (2.0,)], "b": "3"}


def test_copy_each_copies_in_place_and_converts() -> None:
    copies = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)]
    private.copy_each(copies, [torch.ones(2), torch.ones(1)])
    assert [copy.tolist() for copy in copies] == [[1, 1], [1]]
