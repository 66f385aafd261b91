"""What NCCL may take of a GPU: processors of each group, memory of its buffers; the environment it needs. No torch.

An operation of NCCL holds its processors from the moment it is started until it ends, also while it waits for another
rank. A receive that is posted early waits for most of a step. Kernels of ours that wait for another rank's kernels (the
fused matmuls of tp, those that bring rows to experts) hold theirs too. If both together want more than a GPU has, one
that could go on may find no room: rank A's kernel waits for rank B's, which finds no room beside a receive that waits
for rank A. So each group has a limit, and our kernels leave as many processors free as the groups that run beside them
may hold together:

    group                       processors   beside our kernels
    pp, pp_backward                      2   yes: receives are posted early. Each direction of a pipeline has one
    dp, edp                         4 or 8   yes: sums of gradients during backward. 4 where it spans hosts
    dp_tp, dp_replica                    2   yes: gradients of norms, and of K and V that several ranks hold: few bytes
    tp, ep, replica, ends           NCCL's   no: what is computed next waits for them

The decision a reader will question: few processors cost bandwidth (`nccl_bytes_per_s_per_processor` of the planner's
machines). Four keep up with a network card of 400 Gbit/s. Eight reach about a third of NVLink, and hide behind
backward. With tp 1 and ep 1 no kernel of ours waits for another rank, so nothing can hang: dp takes what NCCL wants,
and none is left free for it.

None of it was measured on several GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

PROCESSORS_OF_PIPELINE = 2
PROCESSORS_OF_REPLICAS, PROCESSORS_ACROSS_HOSTS = 8, 4
PROCESSORS_FOR_FEW_BYTES = 2
# NCCL's own choice is never more (NCCL_MAX_CTAS in its documentation).
MOST = 32
# With fewer our kernels would crawl: a matmul's program each, beside the kernels that wait for copies.
LEAST_LEFT = 8
# Where operations of several communicators are launched in the order of the host's calls (NCCL 2.26's release notes).
LAUNCH_ORDER_SINCE = (2, 26)

_BESIDE = ("pp", "pp_backward", "dp", "edp", "dp_tp", "dp_replica")
# Names by which a user limits processors for all groups. NCCL prefers them to what a group asks for.
_USERS_LIMITS = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")

# Buffers of a connection between two ranks, for each processor: simple 4 MiB, LL128 120 * 640 * 8 * 8 bytes, LL
# 8 * 512 * 8 * 16 bytes (NCCL's src/init.cc: DEFAULT_BUFFSIZE, DEFAULT_LL128_BUFFSIZE, DEFAULT_LL_BUFFSIZE).
CONNECTION_BYTES = (1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
# A group's collectives have a ring and two trees, each with a neighbour of its own.
_NEIGHBOURS = 3
# What NCCL takes on an H100's node where nothing limits it (its log: "24 coll channels").
_OWN_CHOICE = 24


class Axes(Protocol):
    """Sizes of a layout's axes."""

    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def ep(self) -> int: ...


def sizes_of_groups(axes: Axes, kv_replicas: int = 1, *, ends: bool = False) -> dict[str, int]:
    """Return how many ranks each group of a rank has that has a communicator of its own: of more than one rank.

    Args:
        axes: of the layout.
        kv_replicas: tp ranks that share one KV head.
        ends: whether the ends of a pipeline share tied embeddings.
    """
    pp, dp, tp, ep = axes.pp, axes.dp, axes.tp, axes.ep
    sizes = {"pp": pp, "pp_backward": pp, "dp": dp, "tp": tp, "dp_tp": dp * tp if tp > 1 else 1}
    if kv_replicas > 1:
        sizes |= {"replica": kv_replicas, "dp_replica": dp * kv_replicas}
    if ep not in (1, tp):
        sizes |= {"ep": ep, "edp": dp * tp // ep}
    if ends and pp > 1:
        sizes["ends"] = 2
    return {name: size for name, size in sizes.items() if size > 1}


def processors_of_groups(
    axes: Axes, kv_replicas: int = 1, *, spans_hosts: bool = False, users_limit: int = 0
) -> dict[str, int]:
    """Return how many processors NCCL may take for each group that has a limit (the table above).

    Args:
        axes, kv_replicas: as `sizes_of_groups`.
        spans_hosts: whether any group of replicas does.
        users_limit: of the user's own, for every group; 0 for none.
    """
    few = users_limit or PROCESSORS_FOR_FEW_BYTES
    found = {"pp": PROCESSORS_OF_PIPELINE, "pp_backward": PROCESSORS_OF_PIPELINE, "dp_tp": few, "dp_replica": few}
    if users_limit:
        found |= {"pp": users_limit, "pp_backward": users_limit}
    if axes.tp > 1 or axes.ep > 1:
        replicas = users_limit or (PROCESSORS_ACROSS_HOSTS if spans_hosts else PROCESSORS_OF_REPLICAS)
        found |= {"dp": replicas, "edp": replicas}
    return {name: found[name] for name in sizes_of_groups(axes, kv_replicas) if name in found}


def reserved_processors(limits: Mapping[str, int]) -> int:
    """Return how many processors our kernels leave free: as many as NCCL may hold beside them at once.

    Args: limits: of `processors_of_groups`.
    """
    return sum(num for name, num in limits.items() if name in _BESIDE)


def held_processors(axes: Axes, kv_replicas: int, limits: Mapping[str, int]) -> int:
    """Return how many processors NCCL may hold beside our kernels at once, also where it chooses itself.

    That is what `reserved_processors` says where kernels of ours wait for other ranks. Else sums over replicas have no
    limit: products then only have to allow for it (tpkernels/processors.py), and leave nothing free.

    Args:
        axes, kv_replicas: as `sizes_of_groups`.
        limits: of `processors_of_groups`.
    """
    return sum(limits.get(name, MOST) for name in sizes_of_groups(axes, kv_replicas) if name in _BESIDE)


def users_limit(environ: Mapping[str, str]) -> int:
    """Return how many processors the user allows every group, 0 for no limit; NCCL takes it before ours."""
    named = [int(environ[name]) for name in _USERS_LIMITS if environ.get(name, "").isdecimal()]
    return min((num for num in named if num), default=0)


def spans_hosts(axes: Axes, hosts: Sequence[object]) -> bool:
    """Return whether any group of replicas has ranks of several hosts.

    Args:
        axes: of the layout.
        hosts: each rank's, by rank.
    """
    stage = axes.dp * axes.tp
    # Ranks that hold the same experts lie ep apart.
    strides = {axes.tp, axes.ep} if axes.ep > 1 else {axes.tp}
    for stride in strides:
        for first in range(len(hosts)):
            group = range(first, (first // stage + 1) * stage, stride)
            if len({hosts[rank] for rank in group}) > 1:
                return True
    return False


def nccl_variables(environ: Mapping[str, str], version: tuple[int, ...]) -> dict[str, str]:
    """Return the environment variables that several communicators need, but for those that the user has set.

    NCCL_LAUNCH_ORDER_IMPLICIT has operations of several communicators run in the order in which the host calls them,
    which is the plan's and the same on all ranks. Without it two ranks may start two operations in opposite orders, and
    each hold the processors that the other's partner needs.

    CUDA_DEVICE_MAX_CONNECTIONS is how many queues there are from the host to the device. Streams beyond that number
    share one, and then an operation that waits for another rank holds up what stands behind it. A rank has up to
    eleven communicators, each with a stream, beside that of the kernels and those of copies; the default is 8, 32 the
    most. Other engines set 1, to have kernels start in the host's order: here that would put a receive that is posted
    early, and the event that it waits for, in front of everything.

    Args:
        environ: of this process.
        version: NCCL's.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if version >= LAUNCH_ORDER_SINCE:
        wanted["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def words_of_nccl(version: tuple[int, ...], environ: Mapping[str, str], limits: Mapping[str, int]) -> str:
    """Return NCCL's version and how it is used, for the first lines of a run.

    Args:
        version: NCCL's.
        environ: of this process, once the variables above are set.
        limits: of groups (processors_of_groups).
    """
    order = environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")
    if order is None:
        order = "not there before 2.26, so that operations of several groups start in any order"
    parts = [
        f"NCCL {'.'.join(map(str, version))}",
        f"NCCL_LAUNCH_ORDER_IMPLICIT {order}",
        f"CUDA_DEVICE_MAX_CONNECTIONS {environ.get('CUDA_DEVICE_MAX_CONNECTIONS', '8 (default)')}",
    ]
    if limits:
        held = ", ".join(f"{name} {num}" for name, num in limits.items())
        parts.append(f"processors of groups at most {held}")
    if reserved := reserved_processors(limits):
        parts.append(f"kernels of ours leave {reserved} free")
    return ", ".join(parts)


def buffer_bytes(axes: Axes, kv_replicas: int = 1, *, ends: bool = False, spans_hosts: bool = False) -> int:
    """Return an estimate of the memory of a rank's communicators: processors times neighbours times buffers.

    The default group of all ranks counts too. A pipeline's rank sends to and receives from two neighbours, of which
    each direction has its own communicator, so that one of them sends to it.

    Args: as `sizes_of_groups` and `processors_of_groups`.
    """
    sizes = sizes_of_groups(axes, kv_replicas, ends=ends)
    limits = processors_of_groups(axes, kv_replicas, spans_hosts=spans_hosts)
    world = axes.pp * axes.dp * axes.tp
    connections = min(world - 1, _NEIGHBOURS) * PROCESSORS_FOR_FEW_BYTES
    for name, size in sizes.items():
        connections += min(size - 1, _NEIGHBOURS) * limits.get(name, _OWN_CHOICE)
    return connections * CONNECTION_BYTES
