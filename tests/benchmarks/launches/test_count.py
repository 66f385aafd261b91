"""Rung: pure. What a step launches, by the engine's trainer on tensors without memory; only a GPU's profile shows more.

Only one number of the engine's is asserted, by which packed gradients show: others change with the engine.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CountMutations
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")


from benchmarks.launches.count import Options, launches_of, main, totals
from benchmarks.launches.step import BACKWARD, END, FORWARD, _Watch, num_kernels
from tpengine.model.block import Block

META = torch.device("meta")


@pytest.mark.parametrize(
    ("operator", "arguments", "number"),
    [
        (torch.ops.aten.view.default, (torch.empty(4, device=META), [2, 2]), 0),
        (torch.ops.aten.empty.memory_format, ([4],), 0),
        (torch.ops.aten.add.Tensor, (torch.empty(4, device=META),) * 2, 1),
        (torch.ops.aten.zero_.default, (torch.empty(4, device=META),), 1),
        # One chunk of a list each, 320 chunks in a launch, and one launch that ends a norm.
        (torch.ops.aten._foreach_norm.Scalar, ([torch.empty(4, device=META)] * 3,), 2),
        (torch.ops.aten._foreach_norm.Scalar, ([torch.empty(320 * 65536, device=META)],), 2),
        (torch.ops.aten._foreach_norm.Scalar, ([torch.empty(320 * 65536 + 1, device=META)],), 3),
        # 110 tensors in a launch; of a list that is multiplied too.
        (torch.ops.aten._foreach_mul_.Scalar, ([torch.empty(4, device=META)] * 111, 2.0), 2),
    ],
)
def test_an_operator_counts_as_the_kernels_it_launches(operator: Any, arguments: Any, number: int) -> None:
    assert num_kernels(operator, arguments) == number


def test_bytes_are_those_of_each_operand_once() -> None:
    x, watch = torch.empty(4, 8, dtype=torch.bfloat16, device=META), _Watch()
    with watch:
        torch.add(x, x[:1].expand(4, 8))  # a row that is repeated lies in memory once
        x.view(32).mul_(2.0)
        torch.ones(4)[torch.tensor([0, 1])] += 1  # the host's
    kernels = [(one.kernel, one.operands_bytes) for one in watch.launches]
    assert kernels == [("aten.add", 64 + 16 + 64), ("aten.mul_", 64)]


def block_and_end(more: bool) -> Counter[str]:
    """The launches of a block forward and backward, and of a step's end; with `more` one operation more in each."""
    if not more:
        return totals(launches_of("llama_1b"))
    feed = Block.feed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "feed", lambda self, x: feed(self, x).neg())
        return totals(launches_of("llama_1b"))


def test_one_operation_more_in_a_block_is_one_launch_more_each_way(
    ranks: RankPool, count_mutations: CountMutations
) -> None:
    (before,), (after,) = (ranks.run(block_and_end, 1, more) for more in (False, True))
    assert set(before) == {FORWARD, BACKWARD, END} and min(before.values()) > 0
    assert after - before == Counter({FORWARD: 1, BACKWARD: 1})
    count_mutations("launches of a block", 1, 1)


def rows_of(out: Path) -> int:
    return main(Options(traffic=False, out=out))


@pytest.fixture(scope="module")
def rows(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The rows of llama_1b by their names."""
    out = tmp_path_factory.mktemp("launches") / "rows.jsonl"
    assert ranks.run(rows_of, 1, out) == [0]
    return {row["case"]: row for row in map(json.loads, out.read_text().splitlines())}


def test_a_row_per_kernel_and_per_part(rows: dict[str, dict[str, Any]]) -> None:
    for part in (FORWARD, BACKWARD, END):
        of_part = rows[f"launches/llama_1b/{part}"]
        kernels = {
            name.split("/")[-1]: row for name, row in rows.items() if name.startswith(f"launches/llama_1b/{part}/")
        }
        assert of_part["kernels"] == {name: row["num_launches"] for name, row in kernels.items()}
        assert of_part["num_launches"] == sum(of_part["kernels"].values())
        assert of_part["least_bytes"] == sum(row["least_bytes"] for row in kernels.values())


def test_weight_gradients_are_counted_packed_as_a_gpu_has_them(rows: dict[str, dict[str, Any]]) -> None:
    """A block has seven weights and four products: of q, k, v, of the output, of gate and up, and of down."""
    assert rows["launches/llama_1b/backward/matmul_kernel"]["num_launches"] == 4
    assert {(row["attention"], row["weight_gradients"]) for row in rows.values()} == {("ours", "ours")}
