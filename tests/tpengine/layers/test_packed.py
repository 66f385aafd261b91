"""Rung: pure. Who may move a packed weight: the layers when they are made, moved or copied, and nobody afterwards.

Wherever a weight has been put, products use what it holds now.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import Attention, ColumnParallelLinear, PackedWeights
from tpengine.layers.column import declare_places
from tpengine.layers.prepared_weights import lies_at

D, WIDTHS = 6, (4, 2, 3)


class Three(nn.Module):
    """Three layers whose weights one product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(ColumnParallelLinear(D, width, Communicator(None)) for width in WIDTHS)
        self.packed = PackedWeights(*self.parts)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """x[T, D] -> (y_0, y_1, y_2)[T, 9]."""
        return self.packed.forward_packed(x)


def weights_of(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def are_behind_each_other(model: nn.Module) -> bool:
    first, *others = weights_of(model)
    end = first.data_ptr() + first.nbytes
    for weight in others:
        if weight.data_ptr() != end:
            return False
        end += weight.nbytes
    return True


def check(model: Three) -> None:
    """Values and gradients are those of the weights as they are."""
    weights = weights_of(model)
    x = torch.randn(5, D, dtype=weights[0].dtype)
    model.zero_grad()
    y = model(x)
    wanted = torch.cat([x @ weight.detach().T for weight in weights], dim=1)
    torch.testing.assert_close(y, wanted)
    y.square().sum().backward()
    for weight, piece in zip(weights, wanted.split(WIDTHS, dim=1), strict=True):
        torch.testing.assert_close(weight.grad, 2 * piece.T @ x)


def pickled(model: Three) -> Three:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: Three = torch.load(buffer, weights_only=False)
    return loaded


def assigned(model: Three) -> Three:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def each_moved(model: Three) -> Three:
    for part in model.parts:
        part.double()
    return model


MOVES: tuple[Callable[[Three], Three], ...] = (
    lambda model: model.double(),
    lambda model: model.to_empty(device="cpu").requires_grad_(),
    each_moved,
    assigned,
    copy.deepcopy,
    pickled,
)


@pytest.mark.parametrize("move", MOVES)
def test_the_layers_own_moves_lay_their_weights_out_again(move: Callable[[Three], Three]) -> None:
    before = Three()
    check(before)
    moved = move(before)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.copy_(torch.randn(weight.shape))
    assert are_behind_each_other(moved)
    check(moved)
    if moved is not before:
        check(before)
        assert not {w.data_ptr() for w in before.parameters()} & {w.data_ptr() for w in moved.parameters()}


def test_a_write_between_forward_and_backward_is_seen_as_autograd_sees_it() -> None:
    model = Three()
    y = model(torch.randn(5, D))
    with torch.no_grad():
        weights_of(model)[1].clamp_(-0.1, 0.1)
    with pytest.raises(RuntimeError, match="must stay as they are from forward to backward"):
        y.sum().backward()
    check(model)


def in_reverse(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Put the weights into a buffer that they fill, the last one first."""
    weights = weights_of(model)[::-1]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    places = [
        part.view(weight.shape) for part, weight in zip(flat.split([w.numel() for w in weights]), weights, strict=True)
    ]
    for weight, place in zip(weights, places, strict=True):
        weight.data = place
    return flat, places[::-1]


def test_a_weight_that_somebody_has_put_elsewhere_stays_there() -> None:
    """In a buffer of all, or in memory of its own, through writes that autograd does not see."""
    model = Three()
    flat, places = in_reverse(model)
    for _ in range(2):
        check(model)
        flat.normal_()
        model.to("cpu")
        model.load_state_dict(model.state_dict())
        assert all(lies_at(weight, place) for weight, place in zip(weights_of(model), places, strict=True))
    own = torch.randn(WIDTHS[1], D)
    weights_of(model)[1].data = own
    check(model)
    own.normal_()
    check(model)
    assert lies_at(weights_of(model)[1], own)


def test_a_declared_owner_says_when_weights_change_and_nobody_else_moves_them() -> None:
    model = Three()
    flat, places = in_reverse(model)
    declare_places(model, dict(zip(model.parameters(), places, strict=True)))
    check(model)
    x = torch.randn(2, D)
    before = model(x)
    flat.mul_(2)
    torch.testing.assert_close(model(x), before)
    model.packed.release()
    torch.testing.assert_close(model(x), 2 * before)
    check(copy.deepcopy(model))
    for move in (lambda: model.double(), lambda: assigned(model)):
        with pytest.raises(RuntimeError, match=r"one owner: a weight \[\d, 6\] that lies in flat buffers has been"):
            move()


def test_weights_of_another_call_are_not_those_of_a_copy_that_is_kept() -> None:
    model = Three()
    _, places = in_reverse(model)
    declare_places(model, dict(zip(model.parameters(), places, strict=True)))
    x = torch.randn(2, D)
    y = model(x)
    doubled = {name: 2 * value.detach() for name, value in model.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(model, doubled, (x,)), 2 * y)
    torch.testing.assert_close(model(x), y)


def test_a_borrowed_weight_is_its_owners() -> None:
    owner, model = Three(), Three()
    for part, theirs in zip(list(model.parts)[1:], list(owner.parts)[1:], strict=True):
        part.borrow(theirs)  # type: ignore[operator]
    addresses = [weight.data_ptr() for weight in owner.parameters()]
    check(model)
    check(owner)
    assert [weight.data_ptr() for weight in owner.parameters()] == addresses
    owner.double()
    model.double()
    assert are_behind_each_other(owner)
    check(model)
    check(owner)


def test_prepared_weights_are_not_those_that_lay_at_the_same_address() -> None:
    """Memory is given back and taken again by other values, as often as the allocator likes."""
    layer, x = ColumnParallelLinear(D, 64, Communicator(None)), torch.randn(5, D)
    for _ in range(20):
        layer.prepare(len(x))
        layer.weight.data = torch.randn(64, D)
        torch.testing.assert_close(layer(x), x @ layer.weight.detach().T)


def test_attention_on_the_meta_device_gets_its_memory() -> None:
    layer = Attention(8, 2, 2, Communicator(None), device="meta").to_empty(device="cpu")
    assert are_behind_each_other(nn.ModuleList([layer.q_proj, layer.k_proj, layer.v_proj]))
