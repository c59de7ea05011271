"""Removes secrets from a bundle, and on request the names of hosts, users and their folders.

A name is replaced by the same word everywhere (node1, node2, ...), so that one can see which cells share a
host.
"""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stratbench.analysis.records.derived import get_by_path
from stratbench.cell.record import Record
from stratbench.telemetry.machine import environment

LEFT_OUT = "(left out: it looks like a secret)"
_GPU = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HOME = re.compile(r"/(?:home|Users)/([^/\s:;,'\"]+)")
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_WORD = re.compile(r"[\w-]*")
#: Environment variables of SLURM that contain names of nodes.
_NODES = {"SLURM_JOB_NODELIST", "SLURMD_NODENAME"}
#: Environment variables of SLURM that name a site's cluster or partition, with their replacements.
_SITE = {"SLURM_CLUSTER_NAME": "cluster", "SLURM_JOB_PARTITION": "partition"}
#: Sections of a worker's environment variables, each with the function that keeps the allowed ones.
_LISTED = {
    "environment": environment.select_training_variables,
    "slurm": environment.select_slurm_variables,
}


def remove_secrets(value: Any, is_record: bool = False) -> Any:
    """Return a record, config or plan without texts that may be secrets.

    In a record, only the allowed environment variables of a worker remain. In a config, `slurm` or
    `environment` may be the name of an experiment, so that all their keys remain.
    """
    return _remove_secrets(value, is_record, ())


def _remove_secrets(
    value: Any, is_record: bool, path: tuple[str, ...], is_secret: bool = False
) -> Any:
    """Return `value` without secrets; `path` has the keys above it.

    With `is_secret`, the name of a key above says that all texts below are secrets.
    """
    if isinstance(value, list):
        return [_remove_secrets(inner, is_record, path, is_secret) for inner in value]
    if isinstance(value, str):
        return LEFT_OUT if is_secret or environment.contains_secret(value) else value
    if not isinstance(value, dict):
        return value
    cleaned = {}
    for key, inner in value.items():
        if is_record and key in _LISTED and isinstance(inner, dict):
            cleaned[key] = _LISTED[key]({k: str(v) for k, v in inner.items()})
        elif not is_record and _has_user_keys(path) and isinstance(inner, dict):
            cleaned[key] = _remove_secrets(inner, is_record, (*path, key))
        elif (
            environment.is_secret_number_name(key)
            and inner is not None
            and not isinstance(inner, bool)
        ):
            cleaned[key] = LEFT_OUT
        else:
            secret = is_secret or environment.is_secret_name(key)
            cleaned[key] = _remove_secrets(inner, is_record, (*path, key), secret)
    return cleaned


def _has_user_keys(path: tuple[str, ...]) -> bool:
    """Return whether users chose the keys below a path, such as model names.

    The path has the keys above, in a config or a plan.
    """
    if len(path) == 3:
        return path[0] == "studies" and path[2] in ("experiments", "variants")
    return path in (("studies",), ("models",), ("datasets",), ("cells",))


class Replacements:
    """Replaces the names of hosts, GPUs and users' folders by the same words throughout a bundle."""

    def __init__(self, hosts: Iterable[str], gpus: Iterable[str], users: Iterable[str]) -> None:
        short = sorted(
            {host.partition(".")[0].lower() for host in hosts if host} - {"", "localhost"}
        )
        self._hosts = {host: f"node{n}" for n, host in enumerate(short, 1)}
        self._gpus = {gpu: f"GPU-{n}" for n, gpu in enumerate(sorted(set(gpus)), 1)}
        self._addresses: dict[str, str] = {}
        names = "|".join(re.escape(host) for host in sorted(short, key=len, reverse=True))
        # The pattern includes a host's domain.
        self._host = re.compile(rf"(?<![A-Za-z0-9])(?:{names})(?:\.[\w-]+)*(?![A-Za-z0-9])", re.I)
        own = {str(Path.home())} - {"/", "."}
        folders = "|".join(re.escape(folder) for folder in own)
        self._own_home = re.compile(rf"(?<![\w.-])(?:{folders})(?=/|\b)") if folders else None
        people = "|".join(map(re.escape, sorted({user for user in users if user} - {"root"})))
        self._user = re.compile(rf"(?<=/)(?:{people})(?=/|$)") if people else None

    def replace_names(self, text: str) -> str:
        """Return `text` with every name of a host, GPU and user replaced."""
        if self._own_home:
            text = self._own_home.sub("~", text)
        text = _HOME.sub("~", text)
        if self._user:
            text = self._user.sub("user", text)
        text = self._replace_gpus(text)
        return self._host.sub(self._get_node_name, text) if self._hosts else text

    def _replace_gpus(self, text: str) -> str:
        """Return `text` with the ids of GPUs replaced."""
        return _GPU.sub(lambda found: self._gpus.get(found[0], "GPU"), text)

    def _get_node_name(self, match: re.Match[str]) -> str:
        """Return the substitute of a host name that `match` matched."""
        return self._hosts[match[0].partition(".")[0].lower()]

    def replace_names_in_message(self, text: str) -> str:
        """Return a message with names and IP addresses replaced.

        In a message four numbers with dots are an address, and not a version as elsewhere.
        """

        def replace_address(match: re.Match[str]) -> str:
            try:
                ipaddress.ip_address(match[0])
            except ValueError:
                return match[0]
            return self._addresses.setdefault(match[0], f"address{len(self._addresses) + 1}")

        return _ADDRESS.sub(replace_address, self.replace_names(text))

    def replace_names_in_value(self, value: Any) -> Any:
        """Return a JSON value with the names in its texts replaced.

        Keys stay as they are, and so do texts that are one word.
        """
        return _map_texts(value, self._replace_unless_word)

    def _replace_unless_word(self, text: str) -> str:
        """Return `text` with names replaced, except in a single word.

        A host's name may be a common word, such as `ok`.
        """
        return self._replace_gpus(text) if _WORD.fullmatch(text) else self.replace_names(text)

    def replace_names_in_record(self, record: Record) -> Record:
        """Return a record with every name replaced, except in the fields that identify the cell.

        Raises:
            ValueError: If a host is called like a kind of device, such as `cuda`.
        """
        replaced = self.replace_names_in_value(record) | {"cell": record["cell"]}
        if isinstance(record["reason"], str):
            replaced["reason"] = self.replace_names_in_message(record["reason"])
        for old, new in zip(record["workers"], replaced["workers"], strict=True):
            if not (provenance := old["provenance"]):
                continue
            if provenance.get("device") != new["provenance"].get("device"):
                raise ValueError(
                    f"a host has the name of the device {provenance.get('device')}, so that names of hosts "
                    "cannot be replaced"
                )
            if name := get_by_path(provenance, "host.name"):
                new["provenance"]["host"]["name"] = self.replace_names(name)
            for key in ("environment", "slurm"):
                if key in provenance:
                    new["provenance"][key] = _map_texts(provenance[key], self.replace_names)
            slurm = provenance.get("slurm") or {}
            if slurm:
                new["provenance"]["slurm"] |= {key: w for key, w in _SITE.items() if key in slurm}
            for key in _NODES & slurm.keys():
                names = [self.replace_names(name) for name in expand_node_list(slurm[key])]
                new["provenance"]["slurm"][key] = ",".join(names)
        return replaced


def collect_replacements(
    records: Iterable[Record], nodes_of_timelines: Iterable[str]
) -> Replacements:
    """Return replacements for all names in these records, and for this machine and its user."""
    hosts, gpus, users = {socket.gethostname(), *nodes_of_timelines}, set(), set()
    try:
        users.add(getpass.getuser())
    except (OSError, KeyError):
        users.add(Path.home().name)
    for record in records:
        for worker in record["workers"]:
            provenance = worker["provenance"] or {}
            slurm = provenance.get("slurm") or {}
            hosts |= {get_by_path(provenance, "host.name") or "", slurm.get("SLURMD_NODENAME", "")}
            hosts |= set(expand_node_list(slurm.get("SLURM_JOB_NODELIST", "")))
        for text in _iter_texts(record):
            gpus |= {match[0] for match in _GPU.finditer(text)}
            users |= {match[1] for match in _HOME.finditer(text)}
    return Replacements(hosts, gpus, users)


def expand_node_list(listed: str) -> Iterator[str]:
    """Yield the hosts in a SLURM node list, such as five hosts in `gpu[01-03,7],login`."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        if not (match := re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)):
            yield part
            continue
        for numbers in match[2].split(","):
            first, _, last = numbers.partition("-")
            last = last or first
            if first.isdigit() and last.isdigit() and int(last) - int(first) < 10_000:
                for n in range(int(first), int(last) + 1):
                    yield f"{match[1]}{n:0{len(first)}d}{match[3]}"


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every text in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(inner, change) for inner in value]
    if isinstance(value, dict):
        return {key: _map_texts(inner, change) for key, inner in value.items()}
    return value


def _iter_texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _iter_texts(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _iter_texts(inner)
