"""Finds the network interface of this node through which gloo can connect to other nodes."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable

import psutil

from stratbench.study.slurm.commands import read_command_output

#: Environment variable that names gloo's network interface. Without it, gloo uses the address of this node's
#: name.
VARIABLE = "GLOO_SOCKET_IFNAME"
#: Address to find the interface of the default route. It belongs to no host (RFC 5737).
_ANYWHERE = "192.0.2.1"


def set_gloo_interface() -> None:
    """Set gloo's network interface, if other nodes cannot reach its default interface.

    An interface that the user has set stays. The default is unreachable if this node's name resolves to a
    loopback address, as in Debian's /etc/hosts. The function then sets the interface to the other nodes of
    the SLURM job, or else that of the default route. NCCL needs no such setting.
    """
    own = os.uname().nodename
    if VARIABLE in os.environ or not is_loopback(own):
        return
    for other in (*list_other_nodes(own), _ANYWHERE):
        if name := find_interface_to_host(other):
            os.environ[VARIABLE] = name
            return


def is_loopback(host: str) -> bool:
    """Return whether a host name resolves to an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def list_other_nodes(own_name: str) -> Iterable[str]:
    """Return the names of the other nodes of this SLURM job or step. Empty outside of SLURM."""
    listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    names = read_command_output(["scontrol", "show", "hostnames", listed]) if listed else None
    return [name for name in (names or "").split() if name != own_name]


def find_interface_to_host(host: str) -> str | None:
    """Return the name of the interface through which this node reaches a host, or None."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket sends nothing, but selects the interface.
            probe.connect((host, 9))
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
