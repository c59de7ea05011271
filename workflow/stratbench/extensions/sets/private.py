"""Removes private data from a bundle: secrets always; names of hosts, users and folders on request.

A name is replaced by the same word everywhere (node1, node2, ...), so cells of one host remain recognizable.
"""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stratbench.analysis.records.derived import value_at
from stratbench.cell.record import Record
from stratbench.telemetry.machine import environment

LEFT_OUT = "(left out: it looks like a secret)"
_GPU = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HOME = re.compile(r"/(?:home|Users)/([^/\s:;,'\"]+)")
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_WORD = re.compile(r"[\w-]*")
#: Variables in which SLURM names nodes.
_NODES = {"SLURM_JOB_NODELIST", "SLURMD_NODENAME"}
#: Variables in which SLURM describes a site, not the machine.
_SITE = {"SLURM_CLUSTER_NAME": "cluster", "SLURM_JOB_PARTITION": "partition"}
#: The sections of a worker's variables, and the function that keeps those that a record may hold.
_LISTED = {"environment": environment.of_training, "slurm": environment.of_slurm}


def without_secrets(value: Any, is_record: bool = False) -> Any:
    """Return the JSON of a record, a config or a plan without probable secrets.

    In a record, only allow-listed variables of a worker remain. Elsewhere `slurm` or `environment` may be the
    name of an experiment.
    """
    return _cleaned(value, is_record, ())


def _cleaned(value: Any, is_record: bool, path: tuple[str, ...], is_secret: bool = False) -> Any:
    """Return `value`, at `path`, without secrets.

    `is_secret`: its name means that its texts are secrets.
    """
    if isinstance(value, list):
        return [_cleaned(inner, is_record, path, is_secret) for inner in value]
    if isinstance(value, str):
        return LEFT_OUT if is_secret or environment.tells_secret(value) else value
    if not isinstance(value, dict):
        return value
    cleaned = {}
    for key, inner in value.items():
        if is_record and key in _LISTED and isinstance(inner, dict):
            cleaned[key] = _LISTED[key]({k: str(v) for k, v in inner.items()})
        elif not is_record and _holds_names(path) and isinstance(inner, dict):
            cleaned[key] = _cleaned(inner, is_record, (*path, key))
        elif environment.hides_number(key) and inner is not None and not isinstance(inner, bool):
            cleaned[key] = LEFT_OUT
        else:
            secret = is_secret or environment.names_secret(key)
            cleaned[key] = _cleaned(inner, is_record, (*path, key), secret)
    return cleaned


def _holds_names(path: tuple[str, ...]) -> bool:
    """Return whether the keys at this path of a config or a plan are a user's names."""
    if len(path) == 3:
        return path[0] == "studies" and path[2] in ("experiments", "variants")
    return path in (("studies",), ("models",), ("datasets",), ("cells",))


class Replacements:
    """The words that replace hosts, GPUs and users' folders throughout one bundle."""

    def __init__(self, hosts: Iterable[str], gpus: Iterable[str], users: Iterable[str]) -> None:
        short = sorted(
            {host.partition(".")[0].lower() for host in hosts if host} - {"", "localhost"}
        )
        self._hosts = {host: f"node{n}" for n, host in enumerate(short, 1)}
        self._gpus = {gpu: f"GPU-{n}" for n, gpu in enumerate(sorted(set(gpus)), 1)}
        self._addresses: dict[str, str] = {}
        names = "|".join(re.escape(host) for host in sorted(short, key=len, reverse=True))
        # A host name with its domain; a word that follows a dash is a network interface.
        self._host = re.compile(rf"(?<![A-Za-z0-9])(?:{names})(?:\.[\w-]+)*(?![A-Za-z0-9])", re.I)
        own = {str(Path.home())} - {"/", "."}
        folders = "|".join(re.escape(folder) for folder in own)
        self._own_home = re.compile(rf"(?<![\w.-])(?:{folders})(?=/|\b)") if folders else None
        people = "|".join(map(re.escape, sorted({user for user in users if user} - {"root"})))
        self._user = re.compile(rf"(?<=/)(?:{people})(?=/|$)") if people else None

    def text(self, text: str) -> str:
        """`text` with every name replaced."""
        if self._own_home:
            text = self._own_home.sub("~", text)
        text = _HOME.sub("~", text)
        if self._user:
            text = self._user.sub("user", text)
        text = self._gpu(text)
        return self._host.sub(self._node, text) if self._hosts else text

    def _gpu(self, text: str) -> str:
        return _GPU.sub(lambda found: self._gpus.get(found[0], "GPU"), text)

    def _node(self, match: re.Match[str]) -> str:
        return self._hosts[match[0].partition(".")[0].lower()]

    def message(self, text: str) -> str:
        """Return a message with every name replaced.

        Numbers with dots in it are addresses, not versions.
        """

        def address(match: re.Match[str]) -> str:
            try:
                ipaddress.ip_address(match[0])
            except ValueError:
                return match[0]
            return self._addresses.setdefault(match[0], f"address{len(self._addresses) + 1}")

        return _ADDRESS.sub(address, self.text(text))

    def value(self, value: Any) -> Any:
        """Return a JSON value with the names in its texts replaced.

        Keys and plain words stay.
        """
        return _mapped(value, self._unless_a_word)

    def _unless_a_word(self, text: str) -> str:
        """Return `text` with names replaced, unless it is one plain word, as a host may be called `ok`."""
        return self._gpu(text) if _WORD.fullmatch(text) else self.text(text)

    def record(self, record: Record) -> Record:
        """Return a record with every name replaced, except in the fields that identify the cell.

        ValueError if a host has the name of a kind of device.
        """
        replaced = self.value(record) | {"cell": record["cell"]}
        if isinstance(record["reason"], str):
            replaced["reason"] = self.message(record["reason"])
        for old, new in zip(record["workers"], replaced["workers"], strict=True):
            if not (provenance := old["provenance"]):
                continue
            if provenance.get("device") != new["provenance"].get("device"):
                raise ValueError(
                    f"a host is called as the device {provenance.get('device')}, so that names of hosts "
                    "cannot be replaced"
                )
            if name := value_at(provenance, "host.name"):
                new["provenance"]["host"]["name"] = self.text(name)
            for key in ("environment", "slurm"):
                if key in provenance:
                    new["provenance"][key] = _mapped(provenance[key], self.text)
            slurm = provenance.get("slurm") or {}
            if slurm:
                new["provenance"]["slurm"] |= {key: w for key, w in _SITE.items() if key in slurm}
            for key in _NODES & slurm.keys():
                names = [self.text(name) for name in expanded_nodes(slurm[key])]
                new["provenance"]["slurm"][key] = ",".join(names)
        return replaced


def replacements_for(records: Iterable[Record], nodes_of_timelines: Iterable[str]) -> Replacements:
    """Replacements for all names in these records, and for this machine and its user."""
    hosts, gpus, users = {socket.gethostname(), *nodes_of_timelines}, set(), set()
    try:
        users.add(getpass.getuser())
    except (OSError, KeyError):
        users.add(Path.home().name)
    for record in records:
        for worker in record["workers"]:
            provenance = worker["provenance"] or {}
            slurm = provenance.get("slurm") or {}
            hosts |= {value_at(provenance, "host.name") or "", slurm.get("SLURMD_NODENAME", "")}
            hosts |= set(expanded_nodes(slurm.get("SLURM_JOB_NODELIST", "")))
        for text in _texts(record):
            gpus |= {match[0] for match in _GPU.finditer(text)}
            users |= {match[1] for match in _HOME.finditer(text)}
    return Replacements(hosts, gpus, users)


def expanded_nodes(listed: str) -> Iterator[str]:
    """Yield the hosts in a SLURM node list: `gpu[01-03,7],login` has five."""
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


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
