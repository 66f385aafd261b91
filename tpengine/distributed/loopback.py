"""The loopback interface: ranks of one host listen on it, so that no other host can reach them. No torch.

gloo's connections have no password. By default gloo listens at the address of the host's name.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from tpkernels.symmetric.processes import host_identity

# The variable that names the interface on which gloo listens.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


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
