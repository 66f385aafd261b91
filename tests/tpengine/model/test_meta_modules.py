"""Rung: pure, gloo ranks. Modules on the meta device: a rank materialises its stage alone, with values of no layout.

What only a GPU checks: that they appear on the sample's device.
"""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn

from tpengine.model import meta_modules
from tpengine.model.meta_modules import fill_modules, is_on_meta, materialise
from tpengine.modules import Pipeline

CPU = torch.device("cpu")
DIM, NUM = 6, 8
Values = dict[str, Tensor]


class Block(nn.Module):
    """A linear layer, a norm and a table that no state dict holds."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.register_buffer("table", torch.empty(DIM), persistent=False)

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        self.norm.reset_parameters()
        self.table.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh() * self.table


def model_of(tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(7, DIM), *(Block() for _ in range(NUM)), nn.Linear(DIM, 7, bias=False))
    if tied:
        model[2].linear.weight = model[1].linear.weight
    return model


def reset(module: nn.Module, index: int) -> None:
    module.reset_parameters()  # type: ignore[operator]


def made_by(world: int, cut: list[int] | None, tied: bool) -> tuple[Values, int, int, float]:
    """Values and gradients of this rank's stage; its elements; the most that ever had memory; the loss."""
    torch.manual_seed(3 + dist.get_rank())  # rank 0's seed counts
    with torch.device("meta"):
        model = model_of(tied)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, make = 0, meta_modules.make

    def counted(tensor: Tensor, *arguments: object) -> Tensor:
        nonlocal most
        new = make(tensor, *arguments)  # type: ignore[arg-type]
        alive.add(new)
        most = max(most, sum(one.numel() for one in alive))
        return new

    meta_modules.make = counted
    try:
        pipe = Pipeline(
            model, torch.randint(7, (2, 3)), loss_of, num_micro_batches=2, cut=cut, init=reset, schedule="gpipe"
        )
    finally:
        meta_modules.make = make
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (4, 3), generator=generator)
    loss = pipe.step(tokens, tokens)
    held = {name: tensor.detach() for name, tensor in pipe.stage.named_parameters(remove_duplicate=False)}
    held |= dict(pipe.stage.named_buffers())
    held |= {f"gradient of {name}": p.grad for name, p in pipe.stage.named_parameters() if p.grad is not None}
    num = sum(t.numel() for t in (*pipe.stage.parameters(), *pipe.stage.buffers()))
    own = {id(module) for module in pipe.stage}
    assert all(is_on_meta(module) == (id(module) not in own) for module in model)
    return held, num, most, loss


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_values_follow_from_seed_and_place_whatever_the_cut(ranks: RankPool, tied: bool) -> None:
    ((want, whole, _, loss),) = ranks.run(made_by, 1, 1, None, tied)
    assert want["1.linear.weight"].std() > 0.1 and not torch.equal(want["1.linear.weight"], want["3.linear.weight"])
    assert torch.equal(want["1.linear.weight"], want["2.linear.weight"]) == tied
    for world, cut in ((2, None), (2, [3, 7]), (3, [4, 4, 2])):
        seen: Values = {}
        for held, num, most, got in ranks.run(made_by, world, world, cut, tied):
            assert most == num < whole, "a rank has held more than its stage"
            assert got == pytest.approx(loss, rel=1e-5)
            seen |= held
        assert seen.keys() == want.keys()
        for name, value in want.items():
            if name.startswith("gradient"):
                torch.testing.assert_close(seen[name], value)
            else:
                assert torch.equal(seen[name], value), name


def from_a_state_dict(_: int) -> Values:
    torch.manual_seed(0)
    state = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)).state_dict()
    read: list[str] = []

    class Lazy(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    pipe = Pipeline(model, torch.randn(2, 3), nn.functional.mse_loss, num_micro_batches=2, cut=[2, 2], init=Lazy(state))
    held = pipe.stage.state_dict()
    assert set(read) == held.keys()
    assert all(torch.equal(held[name], state[name]) for name in held)
    return held


def test_a_state_dict_fills_a_stage_and_is_read_for_it_alone(ranks: RankPool) -> None:
    first, second = ranks.run(from_a_state_dict, 2, 0)
    assert first.keys() == {"0.weight", "0.bias"} and len(second) == 7


def refused(what: str) -> str:
    with torch.device("cpu" if what == "not on meta" else "meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    init: object = lambda module, index: module.reset_parameters()  # noqa: E731
    match what:
        case "no init":
            init = None
        case "left out":
            init = lambda module, index: module.reset_parameters() if index != 2 else module.bias.zero_()  # noqa: E731
        case "fails":
            init = lambda module, index: module.weight.view(index)  # noqa: E731
        case "state dict without a name":
            init = {name: torch.zeros(p.shape) for name, p in model.named_parameters() if name != "2.bias"}
        case "state dict of other shapes":
            init = {name: torch.zeros(5) for name, p in model.named_parameters()}
        case "other init" if dist.get_rank() == 1:
            init = {}
    sample = torch.empty(2, 3, device="meta") if what == "sample" else torch.randn(2, 3)
    try:
        Pipeline(
            model,
            sample,
            nn.functional.mse_loss,
            num_micro_batches=2,
            cut=[2, 1],
            init=init,  # type: ignore[arg-type]
        )
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("no init", "pass init, a function or a state dict", "pass init, a function or a state dict"),
        ("not on meta", "none is there: leave init out", "none is there: leave init out"),
        ("left out", "ranks [1] could not: see their message", "2.weight got no value from init(module, 2): give"),
        ("fails", "init fails: RuntimeError", "init fails: RuntimeError"),
        ("state dict without a name", "ranks [1] could not", "2.bias got no value from the state dict"),
        ("state dict of other shapes", "0.weight is [5], the module's is [3, 3]", "2.weight is [5]"),
        ("other init", "rank 1 has 'init a state dict' where rank 0 has 'init a function'", "all ranks must build"),
        ("sample", "it is on the meta device: make it on a real one", "it is on the meta device"),
    ],
)
def test_mistakes_are_one_line_on_every_rank(ranks: RankPool, what: str, first: str, second: str) -> None:
    for said, message in zip(ranks.run(refused, 2, what), (first, second), strict=True):
        assert message in said and "\n" not in said.replace("\\n", ""), said


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    made: dict[Tensor, Tensor] = {}
    materialise(module, CPU, made=made)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    fill_modules([(0, "0", module)], reset, 1, CPU, made)
    assert torch.equal(torch.get_rng_state(), state)


_SMALL = [torch.bool, torch.uint8, torch.int8, torch.int16]
_DTYPES = [torch.float16, torch.float8_e4m3fn, torch.int64, torch.complex64, *_SMALL]


@pytest.mark.parametrize("dtype", _DTYPES)
def test_what_has_no_value_is_noticed_in_every_dtype(dtype: torch.dtype) -> None:
    module = nn.Module()
    module.register_buffer("table", torch.empty(3, dtype=dtype, device="meta"))
    made: dict[Tensor, Tensor] = {}
    materialise(module, CPU, made=made)
    with pytest.raises(ValueError, match=r"m\.table got no value from init"):
        fill_modules([(0, "m", module)], lambda module, index: None, 0, CPU, made)
    with pytest.raises(ValueError, match=r"m\.table got no value from the state dict"):
        fill_modules([(0, "m", module)], {}, 0, CPU, made)
    fill_modules([(0, "m", module)], lambda module, index: module.table.copy_(torch.ones(3)), 0, CPU, made)


@pytest.mark.parametrize("dtype", _SMALL)
@pytest.mark.parametrize("way", ["in place", "another tensor", "past autograd", "a shared one"])
def test_zeros_are_values_of_masks_and_small_integers(dtype: torch.dtype, way: str) -> None:
    modules = [nn.Module() for _ in range(2 if way == "a shared one" else 1)]
    table, empty = torch.empty(3, dtype=dtype, device="meta"), torch.empty(0, dtype=dtype, device="meta")
    for module in modules:
        module.register_buffer("table", table)
        module.register_buffer("empty", empty)
    made: dict[Tensor, Tensor] = {}
    for module in modules:
        materialise(module, CPU, made=made)

    def fill(module: nn.Module, index: int) -> None:
        match way:
            case "in place":
                module.table.zero_()
            case "another tensor":
                module.table = torch.zeros(3, dtype=dtype)
            case "past autograd":
                module.table.data.fill_(1)
            case "a shared one" if index == 0:
                module.table.zero_()

    fill_modules([(number, str(number), module) for number, module in enumerate(modules)], fill, 0, CPU, made)


@pytest.mark.parametrize("value", [False, -(2**63), float("nan")])
def test_tensors_that_were_never_on_meta_keep_their_values_whatever_these_are(value: float) -> None:
    """A mask, a padding index, a table of unknowns: made on the CPU, beside weights on the meta device."""
    module = nn.Linear(3, 3, device="meta")
    module.register_buffer("table", torch.tensor([value] * 3), persistent=False)
    made: dict[Tensor, Tensor] = {}
    materialise(module, CPU, made=made)
    fill_modules([(0, "0", module)], {"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3)}, 0, CPU, made)
    assert torch.equal(torch.isnan(module.table), torch.full((3,), value != value))


def test_what_is_shared_stays_shared_and_what_is_written_on_it_stays() -> None:
    with torch.device("meta"):
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight
    one.weight.group = "no decay"  # type: ignore[attr-defined]
    one.bias.requires_grad_(False)
    made: dict[Tensor, Tensor] = {}
    for module in (one, two):
        materialise(module, CPU, made=made)
    assert one.weight is two.weight and one.weight.group == "no decay" and not one.bias.requires_grad
