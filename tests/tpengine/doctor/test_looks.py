"""Rung: pure. What facts mean that no machine here has: each fault is found, named by rank or host, with a remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tpengine.doctor.facts import HostFacts
from tpengine.doctor.finding import MachineFinding
from tpengine.doctor.looks import host_numbers, look_at_facts

HOSTS = (7001, 4002)
GPU: dict[str, Any] = {
    "index": 0,
    "name": "NVIDIA H100",
    "uuid": "uuid-0",
    "capability": "9.0",
    "processors": 132,
    "total_bytes": 80 * 10**9,
    "free_bytes": 79 * 10**9,
    "driver": "570.10",
    "cuda": "12.8",
    "nccl": "2.27.3",
    "visible": 2,
    "peers": [1],
    "links": {"1": "NVLink"},
    "most_mhz": 1980,
}


def facts_of(rank: int, **others: Any) -> HostFacts:
    """A rank of two on each of two hosts, where nothing is wrong."""
    gpu = {
        **GPU,
        "index": rank % 2,
        "uuid": f"uuid-{rank}",
        "peers": [1 - rank % 2],
        "links": {str(1 - rank % 2): "NVLink"},
    }
    fine: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank % 2,
        "pid": 100 + rank,
        "host": HOSTS[rank // 2 % 2],
        "name": f"node{rank // 2}",
        "cores": 16,
        "ranks_here": 2,
        "open_files": (1 << 16, 1 << 16),
        "locked_bytes": (-1, -1),
        "processes": (-1, -1),
        "free_bytes": 10**11,
        "shm_bytes": 10**10,
        "shared_refusal": "",
        "gpu_nodes": 2,
        "infiniband": True,
        "kernel": "6.1",
        "python": "3.12.1",
        "versions": {"torch": "2.13.0", "triton": "3.7.1"},
        "environment": {"NCCL_IB_HCA": "mlx5"},
        "gpu": gpu,
    }
    return HostFacts(**{**fine, **others})


def changes(everyone: list[HostFacts]) -> list[MachineFinding]:
    return [finding for finding in look_at_facts(everyone) if finding.verdict == "change"]


FINE = [facts_of(rank) for rank in range(4)]


def test_four_ranks_on_two_hosts_are_fine_and_said() -> None:
    found = {finding.what: finding for finding in look_at_facts(FINE)}
    assert not changes(FINE)
    assert found["ranks"].value == "4 on 2 hosts" and found["GPUs"].value == "4 x NVIDIA H100"
    assert found["peer access"].value == "all 2 pairs" and found["links between GPUs"].value == "NVLink"
    assert found["NCCL"].value == "2.27.3" and found["NCCL_IB_HCA"].value == "mlx5"
    assert host_numbers(FINE) == {7001: 0, 4002: 1}
    assert all(HostFacts.of_json(facts.to_json()) == facts for facts in FINE)


def with_gpu(facts: HostFacts, **others: Any) -> HostFacts:
    assert facts.gpu is not None
    return replace(facts, gpu={**facts.gpu, **others})


# What is wrong on ranks 2 and 3, or on rank 3 alone -> what is found, and where; a word of its remedy.
ON_HOST_1: dict[str, tuple[dict[str, Any], str, str]] = {
    "open files": ({"open_files": (256, 4096)}, "host 1", "ulimit -n 4096"),
    "locked memory": ({"locked_bytes": (65536, 65536)}, "host 1", "ulimit -l unlimited"),
    "/dev/shm": ({"shm_bytes": 64 << 20}, "host 1", "--shm-size"),
    "shared memory": ({"shared_refusal": "EPERM"}, "host 1", "memfd_create"),
    "free memory": ({"free_bytes": 10**9}, "host 1", "--mem=0"),
    "cores": ({"cores": 1}, "host 1", "at most 1"),
    "torch": ({"versions": {"torch": "2.12.0", "triton": "3.7.1"}}, "", "pip install torch==2.13.0"),
    "python": ({"python": "3.11.4"}, "", "same environment"),
    "NCCL_IB_HCA": ({"environment": {}}, "", "export NCCL_IB_HCA"),
    "ranks of each host": ({"ranks_here": 1}, "", "--nproc-per-node"),
}


@pytest.mark.parametrize("what", ON_HOST_1)
def test_what_is_wrong_on_one_host_is_found_there(what: str) -> None:
    wrong, where, word = ON_HOST_1[what]
    (finding,) = changes([*FINE[:2], *(replace(facts, **wrong) for facts in FINE[2:])])
    assert (finding.what, finding.where) == (what, where) and word in finding.remedy


OF_GPUS: dict[str, tuple[dict[str, Any], str]] = {
    "driver": ({"driver": "535.1"}, "same version on every host"),
    "NCCL": ({"nccl": "2.21.5"}, "nvidia-nccl"),
    "GPUs": ({"name": "NVIDIA A100"}, "of one kind"),
    "GPU memory taken": ({"free_bytes": 10**9}, "end the processes"),
    "peer access": ({"peers": []}, "nvidia-smi topo"),
}


@pytest.mark.parametrize("what", OF_GPUS)
def test_what_is_wrong_with_gpus_is_found(what: str) -> None:
    wrong, word = OF_GPUS[what]
    found = changes([*FINE[:2], *(with_gpu(facts, **wrong) for facts in FINE[2:])])
    assert {finding.what for finding in found} == {what} and all(word in finding.remedy for finding in found)


def test_versions_that_differ_name_their_hosts() -> None:
    (finding,) = changes([*FINE[:2], *(with_gpu(facts, nccl="2.21.5") for facts in FINE[2:])])
    assert finding.value == "2.27.3 (host 0), 2.21.5 (host 1)"


def test_ranks_that_share_a_gpu_are_named() -> None:
    found = changes([FINE[0], with_gpu(FINE[1], uuid="uuid-0"), *FINE[2:]])
    assert [(finding.what, finding.where) for finding in found] == [("GPUs that ranks share", "ranks 0, 1")]


def test_a_setting_that_makes_all_slow_is_to_be_unset() -> None:
    (finding,) = changes([facts_of(rank, environment={"NCCL_P2P_DISABLE": "1"}) for rank in range(4)])
    assert (finding.what, finding.remedy, finding.where) == (
        "NCCL_P2P_DISABLE",
        "unset NCCL_P2P_DISABLE",
        "ranks 0 to 3",
    )


def test_each_rank_may_see_its_own_gpu() -> None:
    assert not changes([facts_of(rank, environment={"CUDA_VISIBLE_DEVICES": str(rank)}) for rank in range(4)])


def test_gpus_that_torch_does_not_see_are_no_machine_without_gpus() -> None:
    blind = [facts_of(rank, gpu=None, gpu_nodes=8) for rank in range(2)]
    (finding,) = changes(blind)
    assert finding.what == "GPUs" and "8 here" in finding.value and "nvidia-smi" in finding.remedy
    none = look_at_facts([facts_of(rank, gpu=None, gpu_nodes=0) for rank in range(2)])
    assert [finding.verdict for finding in none if finding.what == "GPUs"] == ["unseen"]


def test_few_open_files_are_enough_for_few_ranks() -> None:
    """1,024, which most systems give, are enough for a host of eight, and too few for hundreds of ranks."""
    few = {"open_files": (1024, 1024), "gpu": None, "gpu_nodes": 0, "ranks_here": 8}
    assert not changes([facts_of(rank, host=1, **few) for rank in range(8)])
    many = {**few, "ranks_here": 128, "cores": 128, "free_bytes": 10**12}
    (finding,) = changes([facts_of(rank, host=1, **many) for rank in range(128)])
    assert finding.what == "open files" and "LimitNOFILE" in finding.remedy
