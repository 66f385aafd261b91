"""Rung: gloo ranks. Weights laid out for their products once per step give the same training, and are never stale.

Small models reach this path only where the products' least size is lowered, and some machines' fastest library has no
such layout; both are overridden here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.arena import exchange_bytes
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.matmul import host as host_gemm

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.layers import Attention, ColumnParallelLinear, RowParallelLinear, SwiGLU
from tpengine.layers.collectives import WholeRows
from tpengine.model.transformer import Transformer
from tpengine.runs.trainer import Trainer

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this build of torch has no oneDNN: weights are never laid out",
)


@contextlib.contextmanager
def every_product_by_onednn() -> Iterator[None]:
    """Products of any size, on any processor."""
    with patch.object(host_gemm, "FEWEST_MULTIPLICATIONS", 0), patch.object(host_gemm, "has_onednn", lambda: True):
        yield


def train(config: Config, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, this rank's parameters, and how many weights were laid out in the last step."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    laid_out = []
    prepared = host_gemm.PreparedMatrix.__init__

    def noting(self: host_gemm.PreparedMatrix, matrix: Tensor, num_rows: int) -> None:
        prepared(self, matrix, num_rows)
        laid_out.append(self.laid_out is not None)

    losses = []
    with every_product_by_onednn():
        for step in range(num_steps):
            laid_out.clear()
            with patch.object(host_gemm.PreparedMatrix, "__init__", noting):
                losses.append(trainer.step.run(step).loss)
    return losses, {name: p.detach().clone() for name, p in trainer.state.model.named_parameters()}, sum(laid_out)


def largest_difference(config: Config) -> tuple[float, int]:
    """Between training prepared and unprepared, relative to each tensor's largest element."""
    losses, parameters, num_laid_out = train(config)
    with patch.object(Transformer, "prepare", lambda self, num_tokens: None):
        want_losses, wanted, none = train(config)
    assert not none
    pairs = [(torch.tensor(losses), torch.tensor(want_losses))] + [(p, wanted[name]) for name, p in parameters.items()]
    finite = [(got, want) for got, want in pairs if torch.isfinite(want).all()]  # the first stage knows no loss
    return max(((got - want).abs().max() / want.abs().max()).item() for got, want in finite), num_laid_out


def single(config: Config) -> Config:
    return replace(config, train=replace(config.train, dtype="float32"))


# That tensor-parallel layers lay out too is checked below.
@pytest.mark.by_default("layout0")
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_training_is_the_same(ranks: RankPool, layout: tuple[int, int, int]) -> None:
    config = single(config_of(*layout, tied=False, kv_heads=2))
    for difference, num_laid_out in ranks.run(largest_difference, layout[0] * layout[1] * layout[2], config):
        # A pipeline whose stages are alone keeps no copies.
        assert (num_laid_out > 0) == (layout != (1, 1, 2)) and difference < 1e-4


def check_a_stale_layout_is_noticed() -> None:
    comm = Communicator(dist.group.WORLD, arena_bytes=exchange_bytes(32, 4 * 24, dist.get_world_size()))
    torch.manual_seed(0)
    x = torch.randn(32, 24)[comm.rank * 32 // comm.size :][: 32 // comm.size]
    modules: list[tuple[torch.nn.Module, Callable[..., Tensor], Tensor]] = []
    for module in (ColumnParallelLinear(24, 48, comm), SwiGLU(24, 48, comm)):
        modules.append((module, module, x))
    modules.append((RowParallelLinear(48, 24, comm), lambda x: modules[2][0](x), torch.randn(32, 48 // comm.size)))
    attention = Attention(24, 4, 4, comm)
    modules.append((attention, lambda x: attention(x, 16), x))
    with every_product_by_onednn():
        for module, call, operand in modules:
            module.prepare(32)  # type: ignore[operator]
            prepared = call(operand)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(2)
            changed = call(operand)
            assert not torch.equal(changed, prepared)
            module.release()  # type: ignore[operator]
            torch.testing.assert_close(changed, call(operand))
            # Memory that was replaced, too.
            module.prepare(32)  # type: ignore[operator]
            module.load_state_dict({name: p / 2 for name, p in module.state_dict().items()}, assign=True)
            torch.testing.assert_close(call(operand), prepared)


def test_a_stale_layout_is_noticed(ranks: RankPool) -> None:
    ranks.run(check_a_stale_layout_is_noticed, 2)


def check_layers_of_whole_rows_are_prepared_for_one_row() -> None:
    whole = WholeRows(Communicator(dist.group.WORLD, arena_bytes=1 << 16))
    x = torch.randn(1, 24, generator=torch.Generator().manual_seed(0))
    asked: list[int] = []
    one_row = host_gemm._for_mkl

    def noting(matrix: host_gemm.Matrix, num_rows: int) -> Tensor:
        asked.append(num_rows)
        assert isinstance(matrix, host_gemm.PreparedMatrix) and matrix.for_one_row is not None
        return one_row(matrix, num_rows)

    with every_product_by_onednn(), torch.no_grad():
        for layer in (ColumnParallelLinear(24, 48, whole), SwiGLU(24, 48, whole), RowParallelLinear(48, 24, whole)):
            operand = torch.randn(1, 48 // whole.size) if isinstance(layer, RowParallelLinear) else x
            plain = layer(operand)
            layer.prepare(1)
            asked.clear()
            with patch.object(host_gemm, "_for_mkl", noting):
                torch.testing.assert_close(layer(operand), plain)
            assert asked == [1] * (2 if isinstance(layer, SwiGLU) else 1)


def test_layers_of_whole_rows_are_prepared_for_one_row(ranks: RankPool) -> None:
    ranks.run(check_layers_of_whole_rows_are_prepared_for_one_row, 2)


def check_what_does_not_fit_is_refused_in_the_same_words() -> None:
    comm = Communicator(dist.group.WORLD, arena_bytes=exchange_bytes(32, 4 * 24, dist.get_world_size()))
    for layer in (ColumnParallelLinear(24, 48, comm), SwiGLU(24, 48, comm), RowParallelLinear(24, 48, comm)):
        width = 24 // comm.size if isinstance(layer, RowParallelLinear) else 24
        layer.prepare(8)
        for operand in (
            torch.randn(4, width - 1),
            torch.randn(4),
            torch.randn(4, width, dtype=torch.float64),
            torch.randn(4, width, device="meta"),
        ):
            prepared = said_of(layer, operand)
            layer.release()
            assert prepared == said_of(layer, operand)
            layer.prepare(8)
            assert "needs" in prepared and "\n" not in prepared
        # The group is not poisoned.
        assert torch.isfinite(layer(torch.randn(4, width))).all()


def said_of(layer: torch.nn.Module, operand: Tensor) -> str:
    with pytest.raises(ValueError) as refused:
        layer(operand)
    return str(refused.value)


def test_what_does_not_fit_is_refused_in_the_same_words(ranks: RankPool) -> None:
    ranks.run(check_what_does_not_fit_is_refused_in_the_same_words, 2)


def test_a_dtype_that_is_not_multiplied_is_refused_although_the_weight_is_prepared() -> None:
    layer = RowParallelLinear(24, 48, Communicator(None), dtype=torch.complex64)
    layer.prepare(4)
    with pytest.raises(ValueError, match="multiplies float16"):
        layer(torch.randn(4, 24, dtype=torch.complex64))
