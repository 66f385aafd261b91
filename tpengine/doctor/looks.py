"""What facts of hosts and GPUs mean: findings over what every rank has gathered. Pure; no torch.

Each look takes the facts of all ranks, by rank, and returns its findings. What was measured is judged in verdicts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tpengine.doctor.facts import HostFacts
from tpengine.doctor.finding import MachineFinding, change, ok, places, unseen

# Descriptors of a rank that has no peers: files of data, libraries, its terminal.
_OWN_FILES = 512
# Of each peer: a socket in each of eight groups (mesh.py), and a mapping of its memory.
_FILES_PER_PEER = 9
# What NCCL puts under /dev/shm for a rank that it reaches through the host: buffers of some megabytes for each channel.
# Assumed: no machine with several GPUs has run this.
_SHM_PER_GPU_BYTES = 64 << 20
# A rank of the smallest preset takes 0.4 GB.
_LEAST_FREE_BYTES = 1 << 30
# Of a GPU's memory what others may hold: a context of CUDA takes 0.5 GB.
_FOREIGN_BYTES = 2 << 30
# Settings with which every step is slower or other than measured, and why somebody sets them.
_SLOW_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "NCCL_P2P_DISABLE": ("1", "GPUs copy through the host"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a host talk over the network"),
    "NCCL_IB_DISABLE": ("1", "hosts talk over TCP"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked"),
    "TRITON_INTERPRET": ("1", "kernels run in Python"),
}


def look_at_facts(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Return the findings of all looks, in the order of the table.

    Args:
        everyone: the facts of all ranks that have answered.
    """
    looks: tuple[Callable[[Sequence[HostFacts]], list[MachineFinding]], ...] = (
        *(hosts, versions, environment, cores, memory, open_files, locked_memory, shared_memory),
        *(gpus, drivers, peers),
    )
    return [finding for look in looks for finding in look(everyone)]


def host_numbers(everyone: Sequence[HostFacts]) -> dict[int, int]:
    """Return each host's number from 0, in the order of their first ranks, by its identity."""
    found: dict[int, int] = {}
    for facts in everyone:
        found.setdefault(facts.host, len(found))
    return found


def hosts(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say how many hosts and ranks there are, and whether each host has as many ranks."""
    numbers = host_numbers(everyone)
    counts = {numbers[facts.host]: facts.ranks_here for facts in everyone}
    names = {numbers[facts.host]: facts.name for facts in everyone}
    said = ok("ranks", f"{len(everyone)} on {len(numbers)} host{'s' if len(numbers) > 1 else ''}")
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{names[host]} {count}" for host, count in counts.items())
        return [
            change("ranks of each host", told, remedy="torchrun --nproc-per-node N   # the same N on every host"),
        ]
    return [said]


def versions(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say versions, and which hosts have others: ranks with another torch or NCCL hang or disagree."""
    found = []
    packages = sorted({name for facts in everyone for name in facts.versions})
    for name in packages:
        told = _by_host(everyone, lambda facts, name=name: facts.versions.get(name, "missing"))  # type: ignore[misc]
        first = next(iter(told))
        if len(told) > 1 and name != "numpy":
            found.append(change(name, _told(told), remedy=f"pip install {name}=={first}   # on every host"))
        else:
            found.append(ok(name, first))
    pythons = _by_host(everyone, lambda facts: facts.python)
    if len({python.rpartition(".")[0] for python in pythons}) > 1:
        found.append(change("python", _told(pythons), remedy="use the same environment on every host"))
    else:
        found.append(ok("python", next(iter(pythons))))
    return found


def environment(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say which settings of NCCL and CUDA are in the environment, which differ over ranks, which make all slow."""
    names = sorted({name for facts in everyone for name in facts.environment})
    own = ("CUDA_VISIBLE_DEVICES",)  # may differ: each rank may see its own GPU
    found = []
    for name in names:
        told = _by_rank(everyone, lambda facts, name=name: facts.environment.get(name, "unset"))  # type: ignore[misc]
        value, reason = _SLOW_SETTINGS.get(name, (None, ""))
        if value is not None and value in told:
            found.append(change(name, f"{value}: {reason}", remedy=f"unset {name}", where=places(told[value])))
        elif len(told) > 1 and name not in own:
            found.append(change(name, _told(told, "rank"), remedy=f"export {name}=...   # the same for every rank"))
        elif name.startswith("NCCL_"):
            found.append(ok(name, next(iter(told))))
    return found


def cores(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say how many cores ranks have: two that share one take turns."""
    found = []
    for host, facts in _hosts_of(everyone):
        text = f"{facts.cores} for {facts.ranks_here} rank{'s' if facts.ranks_here > 1 else ''}"
        if facts.cores < facts.ranks_here:
            remedy = f"start at most {facts.cores} processes on it, or give the job more: srun --cpus-per-task"
            found.append(change("cores", text, remedy=remedy, where=host))
        else:
            found.append(ok("cores", text, where=host))
    return found


def memory(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say how much of a host's memory is free, by the machine and its control groups."""
    found = []
    for host, facts in _hosts_of(everyone):
        text = _gigabytes(facts.free_bytes)
        if facts.free_bytes < _LEAST_FREE_BYTES * facts.ranks_here:
            remedy = "cat /sys/fs/cgroup/memory.max; free -g   # give the job more: srun --mem=0, docker run --memory"
            found.append(change("free memory", text, "GB", remedy=remedy, where=host))
        else:
            found.append(ok("free memory", text, "GB", where=host))
    return found


def open_files(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say how many files a rank may have open: each peer takes sockets and a mapping."""
    needed = _OWN_FILES + _FILES_PER_PEER * len(everyone)
    found = []
    for host, facts in _hosts_of(everyone):
        soft, hard = facts.open_files
        if soft == -1 or soft >= needed:
            found.append(ok("open files", _limit(soft), where=host))
            continue
        if hard == -1 or hard >= needed:
            remedy = f"ulimit -n {needed if hard == -1 else hard}"
        else:
            remedy = f"docker run --ulimit nofile={needed}, or LimitNOFILE={needed} of the service that starts jobs"
        found.append(change("open files", f"{soft} of {needed} that are needed", remedy=remedy, where=host))
    return found


def locked_memory(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say how much memory may be locked: InfiniBand needs all of it, and NCCL fails late without."""
    found = []
    for host, facts in _hosts_of(everyone):
        soft, _ = facts.locked_bytes
        needs = facts.infiniband and len(host_numbers(everyone)) > 1
        if needs and soft != -1:
            remedy = "ulimit -l unlimited   # or docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of the service"
            found.append(change("locked memory", f"{soft} bytes beside InfiniBand", remedy=remedy, where=host))
        else:
            found.append(ok("locked memory", _limit(soft), "" if soft == -1 else "bytes", where=host))
    return found


def shared_memory(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say whether ranks of a host can share memory without a name, and whether NCCL has room under /dev/shm."""
    found = []
    for host, facts in _hosts_of(everyone):
        if facts.shared_refusal:
            remedy = (
                "docker run --security-opt seccomp=unconfined --shm-size 8g   # memfd_create or /dev/shm, one of both"
            )
            found.append(change("shared memory", facts.shared_refusal, remedy=remedy, where=host))
        else:
            found.append(ok("shared memory", "ranks of a host can share it", where=host))
        needed = _SHM_PER_GPU_BYTES * facts.ranks_here if facts.gpu and facts.ranks_here > 1 else 0
        text = "none" if facts.shm_bytes < 0 else f"{facts.shm_bytes / 1e6:.0f} MB free"
        if facts.shm_bytes < needed:
            remedy = "mount -o remount,size=8G /dev/shm   # or docker run --shm-size 8g, --ipc=host"
            found.append(change("/dev/shm", f"{text} of {needed / 1e6:.0f} MB for NCCL", remedy=remedy, where=host))
        else:
            found.append(ok("/dev/shm", text, where=host))
    return found


def gpus(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say which GPUs ranks have: of one kind, one each, and free."""
    found = []
    for host, facts in _hosts_of(everyone):
        if facts.gpu is None and facts.gpu_nodes:
            text = f"{facts.gpu_nodes} here, and torch {facts.versions.get('torch', '')} sees none"
            remedy = "nvidia-smi; python -c 'import torch; torch.cuda.init()'   # then install torch's CUDA wheels"
            found.append(change("GPUs", text, remedy=remedy, where=host))
    seen = [facts for facts in everyone if facts.gpu is not None]
    if not seen:
        return found or [unseen("GPUs", "this machine has none", "run it where there are GPUs")]
    kinds = _by_rank(seen, lambda facts: str((facts.gpu or {})["name"]))
    if len(kinds) > 1:
        remedy = "export CUDA_VISIBLE_DEVICES=...   # of one kind: a step waits for the slowest"
        found.append(change("GPUs", _told(kinds, "rank"), remedy=remedy))
    else:
        found.append(ok("GPUs", f"{len(seen)} x {next(iter(kinds))}"))
    cards = _by_rank(seen, lambda facts: f"{facts.host}/{(facts.gpu or {})['uuid']}")
    for ranks in (ranks for ranks in cards.values() if len(ranks) > 1):
        remedy = f"--nproc {len(cards)}   # NCCL needs a GPU for each rank; ranks that share one talk through the host"
        found.append(change("GPUs that ranks share", "one", remedy=remedy, where=places(ranks)))
    for facts in seen:
        gpu = facts.gpu or {}
        taken = gpu["total_bytes"] - gpu["free_bytes"]
        if taken > _FOREIGN_BYTES:
            text = f"{_gigabytes(taken)} of {_gigabytes(gpu['total_bytes'])}"
            remedy = "nvidia-smi   # end the processes that hold it"
            found.append(change("GPU memory taken", text, "GB", remedy=remedy, where=places([facts.rank])))
    return found


def drivers(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say the versions of driver, CUDA and NCCL; hosts whose NCCL differs hang at the first collective."""
    seen = [facts for facts in everyone if facts.gpu is not None]
    found = []
    remedies = {
        "driver": "apt install nvidia-driver-N   # the same version on every host",
        "cuda": "pip install torch   # the same wheel on every host",
        "nccl": "pip install nvidia-nccl-cu12==V   # the same version on every host; unset LD_PRELOAD of another",
    }
    for name, remedy in remedies.items():
        if not seen:
            continue
        told = _by_host(seen, lambda facts, name=name: str((facts.gpu or {})[name]))  # type: ignore[misc]
        label = {"driver": "driver", "cuda": "CUDA", "nccl": "NCCL"}[name]
        if len(told) > 1:
            found.append(change(label, _told(told), remedy=remedy))
        elif not next(iter(told)):
            found.append(unseen(label, "nobody tells its version"))
        else:
            found.append(ok(label, next(iter(told))))
    return found


def peers(everyone: Sequence[HostFacts]) -> list[MachineFinding]:
    """Say which GPUs of a host can address each other's memory, and over what."""
    found = []
    numbers = host_numbers(everyone)
    for identity, number in numbers.items():
        seen = [facts for facts in everyone if facts.host == identity and facts.gpu is not None]
        if len(seen) < 2:
            continue
        where = places([number], "host")
        pairs = [(one, two) for one in seen for two in seen if one.rank != two.rank]
        apart = [(one.rank, two.rank) for one, two in pairs if not _is_peer(one.gpu, two.gpu)]
        kinds = sorted({_link_of(one.gpu, two.gpu) for one, two in pairs} - {""})
        if apart:
            text = f"{len(apart)} of {len(pairs)} pairs have no access, as ranks {apart[0][0]} and {apart[0][1]}"
            remedy = "nvidia-smi topo -p2p r; nvidia-smi topo -m   # until then: --parallel.tp-comm plain"
            found.append(change("peer access", text, remedy=remedy, where=where))
        else:
            found.append(ok("peer access", f"all {len(pairs)} pairs", where=where))
        if kinds:
            found.append(ok("links between GPUs", ", ".join(kinds), where=where))
        else:
            found.append(unseen("links between GPUs", "the driver does not tell", "nvidia-smi topo -m", where=where))
    if not found and any(facts.gpu for facts in everyone):
        found.append(unseen("peer access", "a rank alone has no peer", "tpengine doctor --nproc 8"))
    return found


def _is_peer(one: Any, two: Any) -> bool:
    return two["index"] in one["peers"] or two["uuid"] == one["uuid"]


def _link_of(one: Any, two: Any) -> str:
    return str(one["links"].get(str(two["index"]), ""))


def _hosts_of(everyone: Sequence[HostFacts]) -> Iterable[tuple[str, HostFacts]]:
    """Yield the first rank of each host, with where it is in words: empty for the only host."""
    numbers = host_numbers(everyone)
    seen: set[int] = set()
    for facts in everyone:
        if facts.host not in seen:
            seen.add(facts.host)
            yield (places([numbers[facts.host]], "host") if len(numbers) > 1 else ""), facts


def _by_host(everyone: Sequence[HostFacts], of: Callable[[HostFacts], str]) -> dict[str, list[int]]:
    """Return the hosts by what `of` says of them."""
    numbers = host_numbers(everyone)
    found: dict[str, list[int]] = {}
    for facts in everyone:
        places_of = found.setdefault(of(facts), [])
        if numbers[facts.host] not in places_of:
            places_of.append(numbers[facts.host])
    return found


def _by_rank(everyone: Sequence[HostFacts], of: Callable[[HostFacts], str]) -> dict[str, list[int]]:
    """Return the ranks by what `of` says of them."""
    found: dict[str, list[int]] = {}
    for facts in everyone:
        found.setdefault(of(facts), []).append(facts.rank)
    return found


def _told(found: dict[str, list[int]], what: str = "host") -> str:
    return ", ".join(f"{text} ({places(numbers, what)})" for text, numbers in found.items())


def _limit(limit: int) -> str:
    return "no limit" if limit == -1 else str(limit)


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"
