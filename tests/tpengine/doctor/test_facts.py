"""Rung: pure. What a rank finds about this host; of the environment only names that are known."""

from __future__ import annotations

import os

from tpkernels.symmetric.processes import host_identity

from tpengine.doctor import facts
from tpengine.doctor.facts import host_facts, known_environment

SECRETS = {
    "HF_TOKEN": "hf_abc",
    "AWS_SECRET_ACCESS_KEY": "x",
    "WANDB_API_KEY": "y",
    "HOME": "/home/alice",
    "USER": "alice",
}


def test_of_the_environment_only_known_names_are_read() -> None:
    known = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert known_environment({**SECRETS, **known}) == known


def test_facts_are_this_hosts() -> None:
    found = host_facts(3, 1, 2, {**SECRETS, "NCCL_DEBUG": "INFO"})
    assert (found.rank, found.local_rank, found.ranks_here, found.pid) == (3, 1, 2, os.getpid())
    assert found.host == host_identity() and found.cores >= 1 and found.free_bytes > 0
    assert found.environment == {"NCCL_DEBUG": "INFO"} and found.shared_refusal == ""
    assert found.versions["torch"] and facts.HostFacts.of_json(found.to_json()) == found
