"""What a rank finds about its host by itself: limits, memory, shared memory, versions, settings. No torch.

Only gathers; what the facts mean is said in looks.py, so that tests feed facts that no machine here has.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tpkernels.symmetric.host_memory import TMPFS, MemoryRefused, allocate, available_bytes
from tpkernels.symmetric.processes import host_identity

from tpengine.distributed.launch import num_cores

# Beginnings and names of environment variables that change how ranks compute and communicate. No other is read: what
# else the environment holds may be secret.
NAMES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
)
BEGINNINGS = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_SYMM", "FI_", "UCX_", "TRITON_INTERPRET")
# Sums of memory that a small run shares: enough to tell a refusal from a limit.
_TRIED_BYTES = 1 << 20
_PACKAGES = ("torch", "triton", "numpy", "tpengine")


@dataclass(frozen=True)
class HostFacts:
    """What a rank knows of its host; JSON holds it.

    Attributes:
        rank, local_rank, pid: of the process.
        host, name: the host's number and its name.
        cores, ranks_here: that the process may use, and its host's ranks.
        open_files, locked_bytes, processes: (soft, hard) limits; -1 for none.
        free_bytes: of memory, by the machine and its control groups.
        shm_bytes: free under /dev/shm; -1 if there is none.
        shared_refusal: why memory was not given that ranks share; empty if it was.
        gpu_nodes: files of NVIDIA's driver for GPUs, /dev/nvidia0 and so on.
        infiniband: whether the host has such cards.
        kernel, python: versions.
        versions: of packages.
        environment: of names that are known (NAMES, BEGINNINGS).
        gpu: what torch says of this rank's GPU and its peers (gpu_facts.py); None if torch sees none.
    """

    rank: int
    local_rank: int
    pid: int
    host: int
    name: str
    cores: int
    ranks_here: int
    open_files: tuple[int, int]
    locked_bytes: tuple[int, int]
    processes: tuple[int, int]
    free_bytes: int
    shm_bytes: int
    shared_refusal: str
    gpu_nodes: int
    infiniband: bool
    kernel: str
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> HostFacts:
        """Return the facts of which `to_json` made this."""
        pairs = {name: tuple(content[name]) for name in ("open_files", "locked_bytes", "processes")}
        return cls(**{**content, **pairs})


def host_facts(rank: int, local_rank: int, ranks_here: int, environ: Mapping[str, str], **more: Any) -> HostFacts:
    """Return the facts of this process and its host.

    Args:
        rank, local_rank, ranks_here: see HostFacts.
        environ: of the process.
        more: other fields of HostFacts.
    """
    return HostFacts(
        rank=rank,
        local_rank=local_rank,
        pid=os.getpid(),
        host=host_identity(),
        name=socket.gethostname(),
        cores=num_cores(),
        ranks_here=ranks_here,
        open_files=_limits(resource.RLIMIT_NOFILE),
        locked_bytes=_limits(resource.RLIMIT_MEMLOCK),
        processes=_limits(resource.RLIMIT_NPROC),
        free_bytes=available_bytes(),
        shm_bytes=_free_bytes(Path(TMPFS)),
        shared_refusal=_shared_refusal(),
        gpu_nodes=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        kernel=platform.release(),
        python=platform.python_version(),
        versions={name: found for name in _PACKAGES if (found := _version(name))},
        environment=known_environment(environ),
        **more,
    )


def known_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how ranks compute and communicate, by name; never another."""
    return {name: environ[name] for name in sorted(environ) if name in NAMES or name.startswith(BEGINNINGS)}


def _limits(number: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(number)
    return tuple(-1 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))  # type: ignore[return-value]


def _free_bytes(directory: Path) -> int:
    with contextlib.suppress(OSError):
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize
    return -1


def _shared_refusal() -> str:
    """Return why a little memory that ranks share is refused; empty if it is given."""
    try:
        os.close(allocate(_TRIED_BYTES))
    except MemoryRefused as error:
        return str(error)
    return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
