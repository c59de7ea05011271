"""Saves and loads a parameter server's state: tensors as bytes, other values as JSON.

The file `<folder>/state<server>.json` names the file of its tensors, `state<server>.<n>.bin`. It is written
when the tensors are complete, and only then the previous files are deleted. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from stratbench.cell.files import write_text_atomically
from stratbench.extensions.elastic.servers.journal import get_state_manifest_path
from stratbench.extensions.servers.policies.policy import Fields
from stratbench.extensions.servers.ps.store import Store
from stratbench.extensions.servers.ps.tickets import CompactIntSet, intersect_sets
from stratbench.extensions.servers.wire.shm import DTYPES, Layout, get_dtype_name
from stratbench.workload.flat import get_tensor_bytes


class StateError(ValueError):
    """A saved state cannot be loaded. The message names the file and what to do."""


def pack_tensors(value: Any, file: BinaryIO) -> Any:
    """Return `value` as values that JSON can store, and append its tensors to `file`."""
    if torch.is_tensor(value):
        data = get_tensor_bytes(value.contiguous()) if value.numel() else b""
        entry = {"at": file.tell(), "shape": list(value.shape), "crc": zlib.crc32(data)}
        file.write(data)
        return {"tensor": entry | {"dtype": get_dtype_name(value.dtype)}}
    if isinstance(value, (list, set)):
        each = [pack_tensors(v, file) for v in (sorted(value) if isinstance(value, set) else value)]
        return {"set": each} if isinstance(value, set) else each
    if isinstance(value, dict):
        kind = "fields" if isinstance(value, Fields) else "dict"
        return {kind: [[key, pack_tensors(v, file)] for key, v in value.items()]}
    return value


def unpack_tensors(value: Any, file: BinaryIO) -> Any:
    """Convert a result of `pack_tensors` back to its value, with tensors from `file`.

    Raises StateError if a tensor is damaged.
    """
    if isinstance(value, list):
        return [unpack_tensors(v, file) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return _read_tensor(inner, file)
    if kind == "set":
        return set(unpack_tensors(inner, file))
    pairs = {key: unpack_tensors(v, file) for key, v in inner}
    return Fields(pairs) if kind == "fields" else pairs


def _read_tensor(entry: dict[str, Any], file: BinaryIO) -> torch.Tensor:
    tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
    data = get_tensor_bytes(tensor) if tensor.numel() else memoryview(bytearray())
    file.seek(entry["at"])
    if file.readinto(data) != len(data) or zlib.crc32(data) != entry["crc"]:
        raise StateError(
            f"{file.name}: is damaged: a checksum is wrong; delete it to start from scratch"
        )
    return tensor


def save_server_state_and_return_pause_s(
    folder: Path, server: int, collect_values: Callable[[], dict[str, Any]], store: Store
) -> float:
    """Save a server's state: first the shards of its store, then other values.

    Args:
        folder: Folder of the states.
        server: Number of the server.
        collect_values: Returns the other values, as JSON can store them.
        store: Store with the shards.

    Returns:
        Seconds for which pushes may have been blocked while shards were copied.
    """
    old = sorted(folder.glob(f"state{server}.*.bin"))
    n = max((int(path.name.split(".")[1]) for path in old), default=-1) + 1
    path = folder / f"state{server}.{n}.bin"
    shards, taken, held_up_s = [], [], 0.0
    with path.open("wb") as file:
        for k, shard in store.shards.items():
            began = time.perf_counter()
            state = shard.state()
            held_up_s += time.perf_counter() - began
            taken.append([state["floor"], sorted(state["above"])])
            shards.append((k, pack_tensors(state, file)))
        buffers = pack_tensors(store.buffers.state(), file) if store.buffers is not None else None
        file.flush()
        os.fsync(file.fileno())
    manifest = {
        "file": path.name, "layout": asdict(store.layout), "facts": collect_values(), "taken": taken,
        "shards": shards, "buffers": buffers,
    }  # fmt: skip
    write_text_atomically(get_state_manifest_path(folder, server), json.dumps(manifest))
    for other in old:
        other.unlink(missing_ok=True)
    return held_up_s


class SavedServerState(NamedTuple):
    """Saved state of one parameter server: its shards of the weights, and other values."""

    layout: Layout
    extra_values: dict[str, Any]
    shards: dict[int, dict[str, Any]]  # `Shard.state` of each shard, by shard number
    buffers: dict[str, Any] | None  # `BufferMean.state`, or None for a model without float buffers


def load_server_state(folder: Path, server: int) -> SavedServerState:
    """Load the last saved state of a parameter server."""
    manifest = _read_state_manifest(folder, server)
    with (folder / manifest["file"]).open("rb") as file:
        shards = {k: unpack_tensors(packed, file) for k, packed in manifest["shards"]}
        buffers = unpack_tensors(manifest["buffers"], file)
    return SavedServerState(Layout(**manifest["layout"]), manifest["facts"], shards, buffers)


def find_tickets_applied_by_all_shards(folder: Path, n_servers: int) -> CompactIntSet:
    """Return the tickets that all shards of all servers had applied when they were saved.

    Servers save their shards at different times. Workers compute all other tickets again. A shard that has
    already applied such a ticket skips it, so that no ticket is applied twice.
    """
    manifests = [_read_state_manifest(folder, server) for server in range(n_servers)]
    return intersect_sets(
        CompactIntSet(*taken) for manifest in manifests for taken in manifest["taken"]
    )


def _read_state_manifest(folder: Path, server: int) -> dict[str, Any]:
    path = get_state_manifest_path(folder, server)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StateError(
            f"{path} is not a valid saved state ({error}); delete it to start from scratch"
        ) from error


class StateSaver:
    """Saves a parameter server's state on another thread, one state at a time."""

    def __init__(self, folder: Path, server: int, on_failure: Callable[[str], None]) -> None:
        """Prepare to save states. If one cannot be written, the thread calls `on_failure(reason)`."""
        self._folder, self._server, self._on_failure = folder, server, on_failure
        self.count = 0  # number of states saved so far
        self.held_up_s = 0.0  # seconds for which pushes of workers waited while shards were copied
        self._thread: threading.Thread | None = None

    def start_state_save(self, store: Store, collect_values: Callable[[], dict[str, Any]]) -> None:
        """Start to save the state, unless another state is being saved."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._write_state, args=(store, collect_values), name="saver", daemon=True
            )
            self._thread.start()

    def _write_state(self, store: Store, collect_values: Callable[[], dict[str, Any]]) -> None:
        try:
            self.held_up_s += save_server_state_and_return_pause_s(
                self._folder, self._server, collect_values, store
            )
            self.count += 1
        # Any error ends the training, because it could not be resumed without saved states.
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            self._on_failure(f"the servers' state could not be saved in {self._folder}: {reason}")

    def wait_for_state_save(self) -> None:
        """Wait until no state is being saved."""
        if self._thread is not None:
            self._thread.join()
