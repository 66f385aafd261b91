"""What the environment says of a process: its rank, their number, and where ranks of one host listen. No torch.

torchrun, srun or a person gives rank and number. Ranks of one host listen on the loopback interface, so that no other
host can reach them: gloo's connections have no password. By default gloo listens at the address of the host's name.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpkernels.symmetric.processes import host_identity

# Range of the ports chosen for SLURM's job steps: below those that Linux assigns by itself.
_FIRST_PORT, _NUM_PORTS = 15000, 10000
# Set for the ranks that `tpengine train --nproc` starts: the process that did.
STARTED = "TPENGINE_STARTED_BY"
# How OpenMP's threads wait: of all libraries, of GNU's, of LLVM's and Intel's.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
# The variable that names the interface on which gloo listens.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Launch:
    """This process's rank, and where the processes meet.

    Attributes:
        rank, world_size: over all nodes.
        local_rank, local_world_size: on this node.
        address, port: where the processes meet: on rank 0's host, unless torchrun's agent keeps the store. Empty and 0
            for one process.
        run: identifies this run, the same on all ranks: torchrun's run id, the process that has started all ranks, or
            the SLURM job step if that chose the port; empty if none is known.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str = ""
    port: int = 0
    run: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launch:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Missing ones come from SLURM's variables if srun has started this process. Without either there is one process.
        RANK without LOCAL_RANK means that all processes are on one host.

        Raises:
            ValueError: not integers, not 0 <= rank < size, RANK and SLURM's number disagree, or there are several
                processes and no address to meet at.
        """
        step = None if "TORCHELASTIC_RUN_ID" in environ else _SlurmStep.of(environ)
        rank, world_size = _pair(environ, "RANK", "WORLD_SIZE", *((step.rank, step.world_size) if step else (0, 1)))
        if step is not None and (rank, world_size) != (step.rank, step.world_size):
            # A single task may start a group of its own. With several, a RANK exported by the batch script is wrong.
            if step.world_size > 1:
                raise ValueError(
                    f"the environment must say one place: RANK {rank} of WORLD_SIZE {world_size}, but SLURM_PROCID "
                    f"{step.rank} of {step.world_size} tasks: unset RANK and WORLD_SIZE, or start with torchrun"
                )
            step = None
        local = (step.local_rank, step.local_world_size) if step else (rank, world_size)
        local_rank, local_world_size = _pair(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", *local)
        if local_world_size > world_size:
            raise ValueError(
                f"a node cannot have more processes than there are: LOCAL_WORLD_SIZE {local_world_size}, WORLD_SIZE "
                f"{world_size}: start with torchrun, or unset LOCAL_WORLD_SIZE"
            )
        if world_size == 1:
            return cls(rank, world_size, local_rank, local_world_size)
        address = environ.get("MASTER_ADDR") or (step.address if step else "")
        port = environ.get("MASTER_PORT") or (str(step.port) if step else "")
        if not (address and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"{world_size} processes must know where to meet: MASTER_ADDR {address or None}, "
                f"MASTER_PORT {port or None}: start with torchrun"
            )
        # If a person chose the port, ranks of several steps may meet there.
        run = f"SLURM's step {_step_name(environ)}" if step and not environ.get("MASTER_PORT") else ""
        if "TORCHELASTIC_RUN_ID" in environ:
            run = f"torchrun's run {environ['TORCHELASTIC_RUN_ID']}"
        elif STARTED in environ:
            run = f"the run of process {environ[STARTED]}"
        return cls(rank, world_size, local_rank, local_world_size, address, int(port), run)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that describe this launch, for libraries that read them."""
        place = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
        }
        meeting = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port} if self.port else {}
        return {name: str(value) for name, value in (place | meeting).items()}


@dataclass(frozen=True)
class _SlurmStep:
    """This task's number and size in a job step that srun has started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> _SlurmStep | None:
        """Read SLURM's variables; return None outside a step.

        A batch script is one process, although it has the whole job's SLURM_PROCID and SLURM_NTASKS; only srun sets
        the step's variables.
        """
        size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), "")
        in_step = any(name.startswith("SLURM_STEP_") for name in environ)
        if not (size and in_step and "SLURM_PROCID" in environ):
            return None
        rank, world_size = _pair(environ, "SLURM_PROCID", size, 0, 1)
        by_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE") or str(world_size)
        node = environ.get("SLURM_NODEID", "0")
        counts = _tasks_per_node(by_node)
        if not (node.isdecimal() and counts):
            raise ValueError(
                f"SLURM must say how many tasks each node has: SLURM_NODEID {node!r}, tasks {by_node!r}: start with "
                "srun or torchrun"
            )
        # SLURM_NTASKS_PER_NODE is one number for all nodes.
        num_local = counts[min(int(node), len(counts) - 1)]
        local = {"SLURM_LOCALID": environ.get("SLURM_LOCALID", str(rank)), "tasks of this node": str(num_local)}
        local_rank, local_world_size = _pair(local, "SLURM_LOCALID", "tasks of this node", 0, 1)
        if local_world_size == world_size:
            address = "127.0.0.1"
        else:
            address = _first_node(environ.get("SLURM_STEP_NODELIST", "")) or environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
        return cls(rank, world_size, local_rank, local_world_size, address, port_of_step(environ))


def _pair(environ: Mapping[str, str], index: str, size: str, default_index: int, default_size: int) -> tuple[int, int]:
    a, b = environ.get(index, str(default_index)), environ.get(size, str(default_size))
    if not (a.isdecimal() and b.isdecimal() and int(a) < int(b)):
        raise ValueError(
            f"the environment must have integers 0 <= {index} < {size}: {index} {a!r}, {size} {b!r}: "
            "start with torchrun, or unset both"
        )
    return int(a), int(b)


def _tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's "4(x2),3" to [4, 4, 3]; return an empty list for any other form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_node(nodes: str) -> str:
    """Return the first name of SLURM's "rack[3-5,9]-n[01-02],gpu7": "rack3-n01"."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0]) if first else ""


def port_of_step(environ: Mapping[str, str]) -> int:
    """Return a port from the step's name; of 10,000 pairs of steps on one node about one would share it."""
    digest = hashlib.sha256(_step_name(environ).encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:8], "little") % _NUM_PORTS


def _step_name(environ: Mapping[str, str]) -> str:
    return f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"


def num_cores(control_groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many cores this process may use: those it may run on, or fewer if a control group limits its time.

    Containers are control groups.


    Args:
        control_groups: where control groups are mounted.
        own: the file that names this process's group.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(math.ceil(limit) for limit in _core_limits(control_groups, own))])


def _core_limits(control_groups: Path, own: Path) -> Iterator[float]:
    """Yield the limit of each control group of this process, in cores."""
    try:
        names = [line.split(":", 2)[1:] for line in own.read_text().splitlines()]
    except OSError:
        return
    for controllers, name in names:
        is_second = not controllers
        if not (is_second or "cpu" in controllers.split(",")):
            continue
        mount = control_groups if is_second else control_groups / "cpu"
        group = mount / name.lstrip("/")
        # In a container the path may be the host's, while the group itself is mounted.
        for directory in (group, *(parent for parent in group.parents if parent.is_relative_to(mount))):
            try:
                if is_second:
                    quota, period = (directory / "cpu.max").read_text().split()
                else:
                    quota, period = ((directory / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
                if int(quota) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError):
                continue  # no limit: no file, "max" or -1


def threads_of_rank(
    launch: Launch, environ: Mapping[str, str], parents: Mapping[str, str] | None, cores: int
) -> int | None:
    """Return the number of threads of a rank on a CPU: its share of the host's cores.

    Args:
        launch: this process's.
        environ: this process's environment.
        parents: the environment with which the parent process was started; None if unknown.
        cores: number of cores that it may use.

    Returns:
        The number; None to keep what is set, or the library's own choice. torchrun sets OMP_NUM_THREADS to 1 unless it
        is set already, so a 1 that is not in torchrun's own environment is not the user's. Any other value is.
    """
    given = environ.get("OMP_NUM_THREADS")
    is_torchruns = given == "1" and "TORCHELASTIC_RUN_ID" in environ and parents is not None
    if given is not None and not (is_torchruns and "OMP_NUM_THREADS" not in (parents or {})):
        return None
    if launch.local_world_size == 1:
        # The only rank on the host. The library's choice is better: it knows which cores are hyper-threads of one.
        return None if given is None else cores
    # srun may have given each task cores of its own.
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdecimal() and "TORCHELASTIC_RUN_ID" not in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return max(1, min(cores, int(per_task)))
    return max(1, cores // launch.local_world_size)


def passive_waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which OpenMP's threads soon sleep while they wait for each other; set them before torch.

    By default they spin. Where another process has one of their cores, all others then burn theirs until it comes back,
    after every parallel region: a step takes tens of times as long as it computes. GNU's threads spin for some
    microseconds here, then sleep: a small model's regions follow each other that fast.

    Args: environ: of this process.
    Returns: nothing if the user has set how threads wait.
    """
    if any(name in environ for name in _WAITING):
        return {}
    # LLVM's and Intel's threads spin for 200 ms first, also if they are told to be passive.
    return {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "1000"}


def environment_of_parent() -> dict[str, str] | None:
    """Return the environment with which this process's parent was started; None if it cannot be read."""
    try:
        text = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def loopback_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that makes gloo listen on loopback only, for ranks that are all on this host.

    Returns:
        An empty dict if the user has named an interface, or if there is no loopback.
    """
    name = "" if GLOO_INTERFACE in environ else loopback_interface()
    return {GLOO_INTERFACE: name} if name else {}


def loopback_interface() -> str:
    """Return the name of this host's loopback interface, lo or lo0 (BSD, Mac); empty if none is up."""
    names = [name for _, name in socket.if_nameindex() if re.fullmatch("lo[0-9]*", name)]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return ""
    return min(names, default="")


def network_identity() -> str:
    """Return a text that is equal for two processes only if they share a loopback; each container has its own."""
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = socket.gethostname()
    return f"{host_identity()} {network}"
