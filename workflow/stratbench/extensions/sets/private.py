"""Removes secrets from a bundle and, on request, the names of hosts, users and their folders.

A host is replaced by the same word everywhere (node1, node2, ...), so that one can see which cells share a
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

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.cell.record import Record
from stratbench.telemetry.machine import environment

LEFT_OUT = "(left out: it looks like a secret)"
_GPU = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HOME = re.compile(r"/(?:home|Users)/([^/\s:;,'\"]+)")
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_WORD = re.compile(r"[\w-]*")
#: Environment variables of SLURM whose values have names of nodes.
_NODES = {"SLURM_JOB_NODELIST", "SLURMD_NODENAME"}
#: Environment variables of SLURM whose values name the cluster or the partition, with their replacements.
_SITE = {"SLURM_CLUSTER_NAME": "cluster", "SLURM_JOB_PARTITION": "partition"}
#: Fields of a worker's provenance with environment variables, each with a function that selects allowed ones.
_LISTED = {
    "environment": environment.select_training_variables,
    "slurm": environment.select_slurm_variables,
}


def remove_secrets(value: Any, is_record: bool = False) -> Any:
    """Return a record, config or plan in which texts that may be secrets are replaced.

    Args:
        value: The content of a JSON file.
        is_record: Whether this is a record, in which only allowed environment variables of workers remain. A
            config may have an experiment with the name `slurm` or `environment`, whose keys all remain.
    """
    return _remove_secrets(value, is_record, ())


def _remove_secrets(
    value: Any, is_record: bool, parent_keys: tuple[str, ...], is_secret: bool = False
) -> Any:
    """Return a value in which texts that may be secrets are replaced.

    Args:
        value: A value within a JSON file.
        is_record: Whether the file is a record.
        parent_keys: Keys above the value.
        is_secret: Whether a key above has the name of a secret, so that all texts below are secrets.
    """
    if isinstance(value, list):
        return [_remove_secrets(inner, is_record, parent_keys, is_secret) for inner in value]
    if isinstance(value, str):
        return LEFT_OUT if is_secret or environment.contains_secret(value) else value
    if not isinstance(value, dict):
        return value
    cleaned = {}
    for key, inner in value.items():
        if is_record and key in _LISTED and isinstance(inner, dict):
            cleaned[key] = _LISTED[key]({k: str(v) for k, v in inner.items()})
        elif not is_record and _has_user_chosen_keys(parent_keys) and isinstance(inner, dict):
            cleaned[key] = _remove_secrets(inner, is_record, (*parent_keys, key))
        elif (
            environment.is_secret_number_name(key)
            and inner is not None
            and not isinstance(inner, bool)
        ):
            cleaned[key] = LEFT_OUT
        else:
            secret = is_secret or environment.is_secret_name(key)
            cleaned[key] = _remove_secrets(inner, is_record, (*parent_keys, key), secret)
    return cleaned


def _has_user_chosen_keys(parent_keys: tuple[str, ...]) -> bool:
    """Return whether users chose the keys of a dict in a config, as in `models`.

    Args:
        parent_keys: Keys above the dict.
    """
    if len(parent_keys) == 3:
        return parent_keys[0] == "studies" and parent_keys[2] in ("experiments", "variants")
    return parent_keys in (("studies",), ("models",), ("datasets",), ("cells",))


class Replacements:
    """Replaces the names of hosts, GPUs and users in a bundle, each by the same word everywhere."""

    def __init__(self, hosts: Iterable[str], gpus: Iterable[str], users: Iterable[str]) -> None:
        short = sorted(
            {host.partition(".")[0].lower() for host in hosts if host} - {"", "localhost"}
        )
        self._hosts = {host: f"node{n}" for n, host in enumerate(short, 1)}
        self._gpus = {gpu: f"GPU-{n}" for n, gpu in enumerate(sorted(set(gpus)), 1)}
        self._addresses: dict[str, str] = {}
        names = "|".join(re.escape(host) for host in sorted(short, key=len, reverse=True))
        # The pattern matches a host name with or without its domain.
        self._host = re.compile(rf"(?<![A-Za-z0-9])(?:{names})(?:\.[\w-]+)*(?![A-Za-z0-9])", re.I)
        own = {str(Path.home())} - {"/", "."}
        folders = "|".join(re.escape(folder) for folder in own)
        self._own_home = re.compile(rf"(?<![\w.-])(?:{folders})(?=/|\b)") if folders else None
        people = "|".join(map(re.escape, sorted({user for user in users if user} - {"root"})))
        self._user = re.compile(rf"(?<=/)(?:{people})(?=/|$)") if people else None

    def replace_names(self, text: str) -> str:
        """Return a text in which hosts, users and GPUs are replaced."""
        if self._own_home:
            text = self._own_home.sub("~", text)
        text = _HOME.sub("~", text)
        if self._user:
            text = self._user.sub("user", text)
        text = self._replace_gpu_ids(text)
        return self._host.sub(self._get_host_substitute, text) if self._hosts else text

    def _replace_gpu_ids(self, text: str) -> str:
        """Return a text in which the ids of GPUs are replaced."""
        return _GPU.sub(lambda match: self._gpus.get(match[0], "GPU"), text)

    def _get_host_substitute(self, match: re.Match[str]) -> str:
        """Return the replacement of a matched host name, such as `node1`."""
        return self._hosts[match[0].partition(".")[0].lower()]

    def replace_names_in_message(self, text: str) -> str:
        """Return an error message in which names and IP addresses are replaced.

        Only in messages, four numbers with dots are an IP address; elsewhere they may be a version.
        """

        def replace_address(match: re.Match[str]) -> str:
            try:
                ipaddress.ip_address(match[0])
            except ValueError:
                return match[0]
            return self._addresses.setdefault(match[0], f"address{len(self._addresses) + 1}")

        return _ADDRESS.sub(replace_address, self.replace_names(text))

    def replace_names_in_value(self, value: Any) -> Any:
        """Return a copy of a JSON value, with the names in its texts replaced.

        Keys, and texts of a single word, are not changed.
        """
        return _map_json_texts(value, self._replace_names_unless_single_word)

    def _replace_names_unless_single_word(self, text: str) -> str:
        """Return a text in which names are replaced, unless it is a single word.

        A single word such as `ok` may also be the name of a host.
        """
        return self._replace_gpu_ids(text) if _WORD.fullmatch(text) else self.replace_names(text)

    def replace_names_in_record(self, record: Record) -> Record:
        """Return a record in which all names are replaced, except in the cell's coordinates.

        Raises:
            ValueError: A host has the name of a kind of device, such as `cuda`.
        """
        replaced = self.replace_names_in_value(record) | {"cell": record["cell"]}
        if isinstance(record["reason"], str):
            replaced["reason"] = self.replace_names_in_message(record["reason"])
        for old, new in zip(record["workers"], replaced["workers"], strict=True):
            if not (provenance := old["provenance"]):
                continue
            if provenance.get("device") != new["provenance"].get("device"):
                raise ValueError(
                    f"names of hosts cannot be replaced, because the device {provenance.get('device')} has "
                    "the name of a host"
                )
            if name := get_field_by_path(provenance, "host.name"):
                new["provenance"]["host"]["name"] = self.replace_names(name)
            for key in ("environment", "slurm"):
                if key in provenance:
                    new["provenance"][key] = _map_json_texts(provenance[key], self.replace_names)
            slurm = provenance.get("slurm") or {}
            if slurm:
                new["provenance"]["slurm"] |= {key: w for key, w in _SITE.items() if key in slurm}
            for key in _NODES & slurm.keys():
                names = [self.replace_names(name) for name in expand_node_list(slurm[key])]
                new["provenance"]["slurm"][key] = ",".join(names)
        return replaced


def collect_replacements(records: Iterable[Record], timeline_hosts: Iterable[str]) -> Replacements:
    """Return replacements for all hosts, GPUs and users in records, and for this machine.

    Args:
        records: The records.
        timeline_hosts: Further names of hosts, from timelines.
    """
    hosts, gpus, users = {socket.gethostname(), *timeline_hosts}, set(), set()
    try:
        users.add(getpass.getuser())
    except (OSError, KeyError):
        users.add(Path.home().name)
    for record in records:
        for worker in record["workers"]:
            provenance = worker["provenance"] or {}
            slurm = provenance.get("slurm") or {}
            hosts |= {
                get_field_by_path(provenance, "host.name") or "",
                slurm.get("SLURMD_NODENAME", ""),
            }
            hosts |= set(expand_node_list(slurm.get("SLURM_JOB_NODELIST", "")))
        for text in _iter_json_texts(record):
            gpus |= {match[0] for match in _GPU.finditer(text)}
            users |= {match[1] for match in _HOME.finditer(text)}
    return Replacements(hosts, gpus, users)


def expand_node_list(node_list: str) -> Iterator[str]:
    """Yield the hosts in a node list of SLURM, such as the five in `gpu[01-03,7],login`."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        if not (match := re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)):
            yield part
            continue
        for numbers in match[2].split(","):
            first, _, last = numbers.partition("-")
            last = last or first
            if first.isdigit() and last.isdigit() and int(last) - int(first) < 10_000:
                for n in range(int(first), int(last) + 1):
                    yield f"{match[1]}{n:0{len(first)}d}{match[3]}"


def _map_json_texts(value: Any, convert_text: Callable[[str], str]) -> Any:
    """Return a JSON value in which each text is converted. Keys are not converted."""
    if isinstance(value, str):
        return convert_text(value)
    if isinstance(value, list):
        return [_map_json_texts(inner, convert_text) for inner in value]
    if isinstance(value, dict):
        return {key: _map_json_texts(inner, convert_text) for key, inner in value.items()}
    return value


def _iter_json_texts(value: Any) -> Iterator[str]:
    """Yield each text in a JSON value, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _iter_json_texts(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _iter_json_texts(inner)
