"""Finds the network interface by which gloo processes on other nodes reach this node."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable

import psutil

from stratbench.study.slurm.commands import read_command_output

#: gloo uses the interface that this variable names, and otherwise the address that this node's own name has.
VARIABLE = "GLOO_SOCKET_IFNAME"
#: An address reserved for documentation (RFC 5737), to which packets would take the default route.
_ANYWHERE = "192.0.2.1"


def set_gloo_interface() -> None:
    """Set gloo's network interface if the default interface is unreachable for other nodes.

    An interface that the user has set stays. The default is unreachable if this node's name means a loopback
    address, as in Debian's /etc/hosts. The interface is then that to the other nodes of the SLURM job, else
    that of the default route. NCCL does not use the name.
    """
    own = os.uname().nodename
    if VARIABLE in os.environ or not is_loopback(own):
        return
    for other in (*list_other_nodes(own), _ANYWHERE):
        if name := find_interface_to_host(other):
            os.environ[VARIABLE] = name
            return


def is_loopback(host: str) -> bool:
    """Return whether a name resolves to an address that is reachable from this machine only."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def list_other_nodes(own: str) -> Iterable[str]:
    """Return the other nodes of this process's SLURM job or step; empty outside of SLURM."""
    listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    names = read_command_output(["scontrol", "show", "hostnames", listed]) if listed else None
    return [name for name in (names or "").split() if name != own]


def find_interface_to_host(host: str) -> str | None:
    """Return the interface by which this node reaches another host. None without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # connecting this socket sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(address).is_loopback:
        return None
    return next(
        (
            name
            for name, its in psutil.net_if_addrs().items()
            if address in (each.address for each in its)
        ),
        None,
    )
