"""Rung: gloo ranks, and pure for what is refused. Models of transformers cut by `parallelize`, against the whole ones.

In float64, under Widened, which lifts transformers' own float32 casts. On a GPU nothing of this has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.architectures.transformers_models import Widened, built
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures import gpt2, llama, qwen3
from tpengine.architectures.describe import column, heads, replicate, row, vocab
from tpengine.layers import clip_grad_norm_, vocab_parallel_cross_entropy
from tpengine.modules import DataParallel, Pipeline, ShardedOptimizer, parallelize, whole_state_dict
from tpengine.modules.rules import Cut

LOGITS, GRADIENTS = 1e-10, 1e-9
# Not a multiple of 4: the table is padded.
VOCAB, HEAD_SIZE, SEQ = 37, 8, 6
# A tenth of the gradients' first norm or less.
MAX_NORM = 0.3


def model_of(name: str, kv_heads: int = 2, *, tied: bool = True) -> Any:
    from transformers import GPT2Config, LlamaConfig, Phi3Config, Qwen3Config

    if name == "gpt2":
        rates = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return built(GPT2Config(**sizes, **rates, tie_word_embeddings=tied))
    kinds = {"llama": LlamaConfig, "qwen3": Qwen3Config, "phi3": Phi3Config}
    return built(
        kinds[name](
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            head_dim=HEAD_SIZE,
            tie_word_embeddings=tied,
            attention_bias=True,
            pad_token_id=None,
        )
    )


# Queries, keys and values in one weight, of which queries are the largest part.
PHI3 = {
    **{name: rule for name, rule in llama.TABLE.items() if "{" not in name},
    "layers.*.self_attn.qkv_proj": column(heads).of("{q,k,v}"),
    "layers.*.mlp.gate_up_proj": column.of("{gate,up}"),
}
PHI3_DIVIDE = {"layers.*.self_attn": ["config.num_attention_heads", "num_key_value_heads"]}


def cut(model: Any, name: str, tp: Communicator, **others: Any) -> Any:
    if name == "gpt2":
        divide = {"h.*.attn": ["split_size"]}
        parallelize(model, gpt2.TABLE, tp, prefix="transformer.", head_size=HEAD_SIZE, divide=divide, **others)
    elif name == "phi3":
        keys = HEAD_SIZE * model.config.num_key_value_heads
        parts = {"layers.*.self_attn.qkv_proj": [4 * HEAD_SIZE, keys, keys]}
        parallelize(model, PHI3, tp, prefix="model.", head_size=HEAD_SIZE, divide=PHI3_DIVIDE, parts=parts, **others)
    else:
        table = llama.TABLE if name == "llama" else qwen3.TABLE
        parallelize(model, table, tp, prefix="model.", head_size=HEAD_SIZE, **others)
    return model


def batch(num: int = 2) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (num, SEQ), generator=torch.Generator().manual_seed(7))
    return tokens, (3 * tokens + 1) % VOCAB


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gradients_of(model: Any) -> dict[str, Tensor]:
    """The whole gradients, under the model's names: gradients put in the weights' place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return whole_state_dict(model)


def apart(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)


@contextmanager
def one_whole(name: str, kv_heads: int) -> Iterator[tuple[Tensor, dict[str, Tensor], dict[str, Tensor], Tensor]]:
    """Logits, weights, gradients and their norm of the model that is not cut."""
    model = model_of(name, kv_heads)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    tokens, labels = batch()
    with Widened():
        logits = model(tokens).logits
        loss_of(logits, labels).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    yield logits, weights, gradients_of(model), norm


def program_of_parity(name: str, kv_heads: int) -> None:
    tp = Communicator(dist.group.WORLD)
    tokens, labels = batch()
    with one_whole(name, kv_heads) as (logits, weights, gradients, norm):
        model = cut(model_of(name, kv_heads), name, tp)
        assert apart(whole_state_dict(model), weights) == 0.0
        # What is cut is smaller: this rank has its part alone.
        held, all_of_it = (sum(p.numel() for p in each.parameters()) for each in (model, model_of(name, kv_heads)))
        assert held < 0.8 * all_of_it or tp.size == 1
        with Widened():
            mine = model(tokens).logits
            loss_of(mine, labels).backward()
        assert float((mine - logits).abs().max()) <= LOGITS
        # Tied names are one tensor still.
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert float(abs(clip_grad_norm_(model, 1e9, tp) - norm)) <= GRADIENTS
        assert apart(gradients_of(model), gradients) <= GRADIENTS


@pytest.mark.by_default("qwen3-2-2", "phi3-2-2")
@pytest.mark.parametrize(
    ("name", "kv_heads", "tp"),
    [
        ("gpt2", 4, 2),
        ("qwen3", 2, 2),
        ("phi3", 2, 2),
        pytest.param("phi3", 4, 4, marks=pytest.mark.slow),
        pytest.param("gpt2", 4, 4, marks=pytest.mark.slow),
        pytest.param("qwen3", 4, 4, marks=pytest.mark.slow),
        pytest.param("llama", 2, 2, marks=pytest.mark.slow),
        pytest.param("llama", 4, 4, marks=pytest.mark.slow),
        pytest.param("gpt2", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_logits_and_gradients_are_those_of_the_whole_model(ranks: RankPool, name: str, kv_heads: int, tp: int) -> None:
    ranks.run(program_of_parity, tp, name, kv_heads)


def program_of_cut_logits() -> None:
    tp = Communicator(dist.group.WORLD)
    tokens, labels = batch()
    with one_whole("gpt2", 4) as (logits, _, gradients, _):
        model = cut(model_of("gpt2"), "gpt2", tp, gather_logits=False)
        mine = model(tokens).logits.flatten(0, 1)
        assert mine.shape[1] == -(-VOCAB // tp.size)
        loss = vocab_parallel_cross_entropy(mine, labels.flatten(), VOCAB, tp) / labels.numel()
        assert float((loss - loss_of(logits, labels)).abs()) <= LOGITS
        loss.backward()
        assert apart(gradients_of(model), gradients) <= GRADIENTS


@pytest.mark.slow
def test_a_loss_takes_the_cut_logits(ranks: RankPool) -> None:
    ranks.run(program_of_cut_logits, 2)


class Embedding(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.wte, self.wpe = body.wte, body.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return x


def chain_of(model: Any) -> nn.Sequential:
    body = model.transformer
    return nn.Sequential(Embedding(body), *body.h, body.ln_f, model.lm_head)


def adamw(model: nn.Module, dp: Communicator, sharded: bool) -> torch.optim.Optimizer:
    if sharded:
        return ShardedOptimizer(torch.optim.AdamW, model.parameters(), dp, lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def program_of_all_axes(sharded: bool) -> list[float]:
    """Three steps on pp 2, dp 2 and tp 2, clipped; the losses."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    pp, dp, tp = (Communicator(mesh.get_group(axis)) for axis in ("pp", "dp", "tp"))
    chain = chain_of(cut(model_of("gpt2", tied=False), "gpt2", tp))
    tokens, labels = (tensor.chunk(dp.size)[dp.rank] for tensor in batch(8))
    pipe = Pipeline(chain, tokens[:2], loss_of, num_micro_batches=2, group=pp.group)
    replicas = DataParallel(pipe.stage, dp)
    optimizer = adamw(pipe.stage, dp, sharded)
    losses = []
    for _ in range(3):
        with replicas.no_sync():
            loss = torch.tensor([pipe.step(tokens, labels)], dtype=torch.float64)
        replicas.finish()
        replicas.clip_grad_norm_(MAX_NORM, tp, pp)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(dp.all_reduce_(loss)) / dp.size)
    state, (_, wanted) = whole_state_dict(pipe.stage), steps_of_one()
    assert state.keys() < wanted.keys()
    assert apart(state, {name: wanted[name] for name in state}) <= GRADIENTS
    return losses


def program_of_parted_ties() -> str:
    with pytest.raises(ValueError, match="a parameter must belong to one rank") as error:
        chain = chain_of(cut(model_of("gpt2"), "gpt2", Communicator(None)))
        Pipeline(chain, batch()[0], loss_of, num_micro_batches=2)
    return str(error.value)


def test_ties_that_a_pipeline_would_part_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(program_of_parted_ties, 2):
        assert said == (
            "a parameter must belong to one rank: 4.weight of rank 1 is shared with rank 0: choose a cut that keeps "
            "both uses together, or untie them"
        )


def program_of_replicas(sharded: bool) -> list[float]:
    """Three steps on dp 2 and tp 2, clipped; the losses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (Communicator(mesh.get_group(axis)) for axis in ("dp", "tp"))
    chain = chain_of(cut(model_of("gpt2", tied=False), "gpt2", tp))
    tokens, labels = (tensor.chunk(dp.size)[dp.rank] for tensor in batch(8))
    replicas = DataParallel(chain, dp)
    optimizer = adamw(chain, dp, sharded)
    losses = []
    for _ in range(3):
        loss = loss_of(chain(tokens), labels)
        loss.backward()
        replicas.finish()
        replicas.clip_grad_norm_(MAX_NORM, tp)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(dp.all_reduce_(loss.detach().clone())) / dp.size)
    assert apart(whole_state_dict(chain), steps_of_one()[1]) <= GRADIENTS
    return losses


def steps_of_one() -> tuple[list[float], dict[str, Tensor]]:
    chain = chain_of(model_of("gpt2", tied=False))
    tokens, labels = batch(8)
    optimizer = torch.optim.AdamW(chain.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(chain(tokens), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chain.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, chain.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_it_trains_with_a_pipeline_and_replicas_as_in_one_process(ranks: RankPool, sharded: bool) -> None:
    wanted, _ = steps_of_one()
    for losses in ranks.run(program_of_all_axes, 8, sharded):
        assert losses == pytest.approx(wanted, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_it_trains_with_replicas_as_in_one_process(ranks: RankPool, sharded: bool) -> None:
    wanted, _ = steps_of_one()
    for losses in ranks.run(program_of_replicas, 4, sharded):
        assert losses == pytest.approx(wanted, abs=1e-9)


def program_of_whole_model(name: str, sharded: bool) -> list[float]:
    """Three steps of a model of transformers as it is, its ends tied, on dp 2 and tp 2; the losses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (Communicator(mesh.get_group(axis)) for axis in ("dp", "tp"))
    model = cut(model_of(name), name, tp)
    replicas = DataParallel(model, dp)
    optimizer = adamw(model, dp, sharded)
    tokens, labels = (tensor.chunk(dp.size)[dp.rank] for tensor in batch(8))
    losses = []
    for _ in range(3):
        with Widened():
            loss = loss_of(model(tokens, use_cache=False).logits, labels)
            loss.backward()
        replicas.finish()
        replicas.clip_grad_norm_(MAX_NORM, tp)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(dp.all_reduce_(loss.detach().clone())) / dp.size)
    return losses


def losses_of_one(name: str) -> list[float]:
    model = model_of(name)
    tokens, labels = batch(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with Widened():
            loss = loss_of(model(tokens).logits, labels)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sharded"), [("gpt2", True), ("qwen3", False), ("phi3", True), ("llama", True)])
def test_a_whole_model_trains_as_in_one_process(ranks: RankPool, name: str, sharded: bool) -> None:
    wanted = losses_of_one(name)
    for losses in ranks.run(program_of_whole_model, 4, name, sharded):
        assert losses == pytest.approx(wanted, abs=1e-9)


class Slopes(nn.Module):
    """A network with weights between its column and its row: a slope, or one for each feature, and maybe a gate."""

    def __init__(self, num_slopes: int, gated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 12), nn.PReLU(num_slopes), nn.Linear(12, 8, bias=False)
        self.gate = nn.Linear(8, 1) if gated else None
        nn.init.uniform_(self.act.weight, 0.1, 0.9)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        hidden: Tensor = self.act(self.up(x))
        y: Tensor = self.down(hidden if self.gate is None else hidden * self.gate(x))
        return y


SLOPES = {"embed": vocab, "norm": replicate, "up": column, "down": row}


def program_of_slopes(num_slopes: int, gated: bool, rules: dict[str, Any]) -> list[str]:
    """What backward says, pass by pass, after it has compared gradients with the whole model's."""
    tp = Communicator(dist.group.WORLD)
    tokens = torch.arange(10)
    weights = torch.randn(10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, one = Slopes(num_slopes, gated), Slopes(num_slopes, gated)
    parallelize(model, {**SLOPES, **rules}, tp)
    assert apart(whole_state_dict(model), one.state_dict()) == 0.0
    # A pass without gradients says nothing, and does not count.
    (model(tokens) * 0.0).sum().backward()
    model.zero_grad(), one.zero_grad()
    for _ in range(4):
        try:
            (model(tokens) * weights).sum().backward()
        except ValueError as error:
            return [str(error)]
        (one(tokens) * weights).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9)
    assert float(abs(clip_grad_norm_(model, 1e9, tp) - norm)) <= GRADIENTS
    assert apart(gradients_of(model), gradients_of_one(one)) <= GRADIENTS
    return []


def gradients_of_one(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("num_slopes", "gated", "rules", "said"),
    [
        (1, False, {"act": replicate(heads)}, None),
        (12, False, {"act": column}, None),
        (1, False, {"act": replicate}, "act.weight has another on ranks [1] than on rank 0"),
        # What is before it is wrong too, and is seen as well where the table sums over tp.
        (12, True, {"act": column, "gate": replicate}, "gate.bias has another on ranks [1]"),
        (12, True, {"act": column, "gate": replicate(heads)}, "norm.weight has another on ranks [1]"),
    ],
)
def test_weights_between_a_column_and_a_row_train_or_are_refused(
    ranks: RankPool, num_slopes: int, gated: bool, rules: dict[str, Any], said: str | None
) -> None:
    for got in ranks.run(program_of_slopes, 2, num_slopes, gated, rules):
        if said is None:
            assert got == []
        else:
            assert len(got) == 1 and said in got[0] and "replicate(heads)" in got[0] and "\n" not in got[0]


class Tiny(nn.Module):
    """A model with each kind of layer, for what is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)
        self.q_norm, self.norm = nn.LayerNorm(4, bias=False), nn.LayerNorm(8)
        self.num_heads, self.drop = 2, nn.Dropout(0.0)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight


TABLE = {
    "embed": vocab,
    "q": column(heads),
    "o": row(heads),
    "q_norm": replicate(heads),
    "norm": replicate,
    "head": vocab,
}


class Seats(Communicator):
    """So many ranks in one process: what is refused is refused before anything is exchanged."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size = size


@pytest.mark.parametrize(
    ("change", "size", "said"),
    [
        ({"table": {name: rule for name, rule in TABLE.items() if name != "norm"}}, 2, "norm has none"),
        ({"table": {**TABLE, "*norm": replicate}}, 2, r"norm has rules .*norm and .*norm"),
        ({"table": {**TABLE, "k": column}}, 2, "k fits none"),
        ({"table": {**TABLE, "norm": column}}, 2, "norm is a LayerNorm"),
        ({"table": {**TABLE, "q": column.transposed}}, 2, "for Conv1D: q is a Linear"),
        ({"table": {**TABLE, "head": row}}, 2, "tied parameters are cut alike: embed.weight and head.weight"),
        ({"table": {**TABLE, "head": replicate}}, 2, "tied parameters are cut alike: embed.weight and head.weight"),
        ({"table": {**TABLE, "q_norm": replicate}}, 2, r"q_norm has the size of a head \(4\)"),
        ({}, 4, "q has 2 heads of 4, tp 4"),
        ({"head_size": None}, 2, "q has a rule .*give head_size"),
        ({"divide": {"": ["num_keys"]}}, 2, "num_keys is None, tp 2"),
        ({"divide": {"": ["config.num_keys"]}}, 2, "config.num_keys is None, tp 2"),
        ({"table": {**TABLE, "q": column(heads).of("{q,k}")}}, 1, r"q has \[4, 4\], o 8: give those of"),
        ({"table": {**TABLE, "q": column(heads).of("{q,k,v}")}}, 1, "q has 8 features of 3: give parts"),
        ({"parts": {"q": [4, 3]}}, 2, r"q has 8 features and rule column of 1, got \[4, 3\]"),
        ({"parts": {"o": [4, 4]}}, 2, r"o has 8 features and rule row of 1, got \[4, 4\]"),
        ({"parts": {"k": [4, 4]}}, 2, "parts names modules of the model: k fits none"),
        (
            {"table": {**TABLE, "q": column.of("{q,k}")}, "parts": {"q": [6, 2]}},
            4,
            "q has 6 features in one of 2 parts",
        ),
        ({"divide": {"h.*": ["num_heads"]}}, 2, r"h\.\* fits none"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(change: dict[str, Any], size: int, said: str) -> None:
    model = Tiny()
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(ValueError, match=said) as error:
        parallelize(model, **{"table": TABLE, "tp": Seats(size), "head_size": 4, **change})
    assert "\n" not in str(error.value)
    assert [type(part) for part in model.modules()] == kinds


def _dropping(model: Tiny) -> None:
    model.drop.p = 0.1


def _dropping_by_itself(model: Tiny) -> None:
    model.q_norm.attention_dropout = 0.1  # type: ignore[assignment]


def _dropping_planes(model: Tiny) -> None:
    model.extra = nn.Dropout2d(0.2)


def _hooked_weight(model: Tiny) -> None:
    model.q.weight.register_hook(lambda gradient: gradient)


def _packed(model: Tiny) -> None:
    model.q = nn.Linear(8, 16)


def _hooked(model: Tiny) -> None:
    model.q.register_forward_hook(lambda *_: None)


def _scaling(model: Tiny) -> None:
    model.embed.scale_grad_by_freq = True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_dropping, "drop has p 0.1"),
        (_dropping_by_itself, "q_norm has attention_dropout 0.1"),
        (_dropping_planes, "extra has p 0.2"),
        (_hooked, "q has some"),
        (_hooked_weight, "q has some"),
        (_packed, r"q has \[16\], o 8: give those of each tensor in it, as parts={'q': \[8, 4, 4\]}"),
        (_scaling, "embed has one"),
        (nn.Module.to_empty, "meta"),
    ],
)
def test_what_a_cut_layer_cannot_do_is_refused(change: Callable[..., Any], said: str) -> None:
    model = Tiny()
    if said == "meta":
        model.to_empty(device="meta")
    else:
        change(model)
    with pytest.raises(ValueError, match=said):
        parallelize(model, TABLE, Seats(2), head_size=4)


def program_of_other_values() -> str:
    model = Tiny()
    nn.init.constant_(model.q.bias, dist.get_rank())
    with pytest.raises(ValueError, match="build it alike") as error:
        parallelize(model, TABLE, Communicator(dist.group.WORLD), head_size=4)
    assert type(model.q) is nn.Linear
    return str(error.value)


def test_other_values_on_a_rank_are_refused_on_all(ranks: RankPool) -> None:
    first, second = ranks.run(program_of_other_values, 2)
    assert first == second


@pytest.mark.parametrize(
    ("parts", "num_ranks"), [((4, 4, 4), 2), ((8,), 4), ((10,), 4), ((5,), 3), ((8, 4, 4), 2), ((2, 12), 2)]
)
def test_a_tensor_comes_back_out_of_its_parts(parts: tuple[int, ...], num_ranks: int) -> None:
    for dim in (0, 1):
        how = Cut(dim, parts)
        whole = torch.randn(how.size, how.size)
        shards = torch.stack([how.take(whole, rank, num_ranks) for rank in range(num_ranks)])
        assert torch.equal(how.join(shards), whole)


def test_packed_queries_keys_and_values_are_each_cut() -> None:
    assert Cut(0, (4, 4, 4)).take(torch.arange(12), 1, 2).tolist() == [2, 3, 6, 7, 10, 11]
    assert Cut(0, (4, 2)).take(torch.arange(6), 1, 2).tolist() == [2, 3, 5]
