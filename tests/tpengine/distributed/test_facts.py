"""Rung: pure, and gloo ranks for the exchange. What hosts and GPUs of a run cannot work, before NCCL is asked."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool

from tpengine.distributed import process
from tpengine.distributed.facts import RankFacts, some
from tpengine.distributed.launch import Launch
from tpengine.distributed.meeting import Meeting
from tpengine.distributed.mesh import Shape, problem_of_ranks

H100 = RankFacts("a", "net a", "NVIDIA H100", "", 132, "2.29.3", "13.1")


def ranks_of(*hosts: str, **given: Any) -> list[RankFacts]:
    """Facts of ranks with a card each, on these hosts."""
    return [replace(H100, host=host, card=f"card {rank}", **given) for rank, host in enumerate(hosts)]


def problem(facts: list[RankFacts], shape: Shape) -> str:
    return problem_of_ranks(facts, shape, 1)


def test_nothing_is_wrong_with_equal_hosts_or_without_gpus() -> None:
    assert problem(ranks_of(*"aabb"), Shape(1, 2, 2)) == ""
    assert problem([RankFacts("a", "net")] * 4, Shape(1, 2, 2)) == ""


def test_versions_of_nccl_that_differ_between_hosts() -> None:
    facts = [*ranks_of(*"aab"), replace(H100, host="b", card="last", nccl="2.27.3")]
    assert problem(facts, Shape(1, 4, 1)) == (
        "all hosts must have one version of NCCL: 2.29.3 on ranks 0, 1, 2 (hosts a, b), 2.27.3 on rank 3 (host b): "
        "install the same torch and nvidia-nccl on all"
    )


def test_ranks_that_share_a_card_do_not_use_nccl() -> None:
    assert problem([H100, replace(H100, nccl="2.27.3")], Shape(1, 2, 1)) == ""


def test_gpus_of_different_kinds_in_one_tp_group() -> None:
    facts = [*ranks_of(*"aa"), *ranks_of(*"bb", gpu="NVIDIA A100", processors=108)]
    facts = [replace(of, card=f"card {rank}") for rank, of in enumerate(facts)]
    assert problem(facts, Shape(1, 2, 2)) == ""
    assert problem(facts, Shape(1, 1, 4)) == (
        "the GPUs of a tp group must be of one kind, since all wait for the slowest: NVIDIA H100 on ranks 0, 1 "
        "(host a), NVIDIA A100 on ranks 2, 3 (host b): start the ranks of a kind beside each other, or use "
        "--parallel.tp 2"
    )


def test_fewer_processors_than_the_groups_need() -> None:
    few = ranks_of(*"aaaaaaaa", processors=16)
    assert problem(few, Shape(2, 2, 2)) == (
        "a GPU must have processors for NCCL's groups and for kernels beside them: NVIDIA H100 of rank 0 (host a) has "
        "16, the groups may hold 14 (pp 2, pp_backward 2, dp 8, dp_tp 2) and kernels need 8: use fewer axes, whole "
        "GPUs (no MIG), or NCCL_MAX_CTAS 1"
    )
    assert problem(few, Shape(1, 1, 8)) == ""
    limited = [replace(of, users_limit=1) for of in few]
    assert problem(limited, Shape(2, 2, 2)) == ""


def test_every_rank_finds_the_same_whatever_its_own_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [replace(of, users_limit=64 * (of.host == "b")) for of in ranks_of(*"aabb", processors=64)]
    line = (
        "all ranks must limit NCCL's processors alike, since kernels leave as many free on each: NCCL_MAX_CTAS or "
        "NCCL_MAX_NCHANNELS is none on ranks 0, 1 (host a), 64 on ranks 2, 3 (host b): export the same on all hosts"
    )
    for own in ("", "64"):
        monkeypatch.setenv("NCCL_MAX_CTAS", own)
        assert problem(facts, Shape(1, 2, 2)) == line
        assert problem(ranks_of(*"aabb", processors=64), Shape(1, 2, 2)) == ""


def test_gpus_beside_cpus() -> None:
    facts = [*ranks_of("a"), RankFacts("b", "net b")]
    assert problem(facts, Shape(1, 2, 1)) == (
        "all ranks must compute on one kind of device: rank 0 (host a) on GPUs, rank 1 (host b) on CPUs: use --device "
        "cpu, or hosts that all have GPUs"
    )


def test_many_ranks_are_named_shortly() -> None:
    assert some("rank", range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert some("host", ["a"]) == "host a"


def said_by(world: int, port: int, gpus: list[str]) -> str:
    """Start as torchrun's ranks do, each of which believes to have a GPU; return what is refused."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    launch = Launch(rank, world, rank, world, "127.0.0.1", port)
    meeting = Meeting(launch, {})
    meeting.connect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "own_facts", lambda _: replace(H100, gpu=gpus[rank], card=f"card {rank}"))
        check = partial(problem_of_ranks, shape=Shape(1, 1, world), kv_replicas=1)
        try:
            process.start(torch.device("cpu"), launch, meeting, 0.0, check)
        except ValueError as error:
            # The pool's worker ends the group that it finds.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
            return str(error)
    return ""


def test_all_ranks_refuse_alike_before_there_is_a_group(ranks: RankPool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    said = ranks.run(said_by, 3, 3, port, ["NVIDIA H100", "NVIDIA H100", "NVIDIA A100"])
    assert len(set(said)) == 1 and "must be of one kind" in said[0] and "use --parallel.tp 1" in said[0]
