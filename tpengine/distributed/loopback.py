"""The loopback interface: where ranks of one host listen, so that nobody on another host can reach them. No torch.

gloo's connections have no password. Left alone it listens at the address that the host's name stands for.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from tpkernels.symmetric.processes import host_identity

# Names the interface that gloo listens on.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def loopback_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that makes gloo listen on loopback alone, for ranks that are all on this host.

    Returns:
        Nothing where the user has named an interface, or where there is no loopback.
    """
    name = "" if GLOO_INTERFACE in environ else loopback_interface()
    return {GLOO_INTERFACE: name} if name else {}


def loopback_interface() -> str:
    """The name of this host's loopback interface: lo, or lo0 on a BSD or a Mac; empty if there is none that is up."""
    names = [name for _, name in socket.if_nameindex() if re.fullmatch("lo[0-9]*", name)]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return ""
    return min(names, default="")


def network_identity() -> str:
    """A text that is equal for two processes only if they share a loopback; each container of a host has its own."""
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = socket.gethostname()
    return f"{host_identity()} {network}"
