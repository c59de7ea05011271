"""Snapshots of the servers' weights at the end of each epoch, as .npy files without pickled data.

`epoch<e>.weights.<s>.npy` has the parameters of server s, and `epoch<e>.buffers.npy` the averaged float
buffers. Each server writes `epoch<e>.<s>.json` last. It marks that the snapshot is complete, and has the
epoch's end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratbench.cell.files import write_text_atomically
from stratbench.extensions.servers.ps.shard import Shard
from stratbench.extensions.servers.wire.shm import DTYPES, get_dtype_name
from stratbench.workload.flat import get_tensor_bytes


def _get_weights_path(folder: Path, epoch: int, server: int) -> Path:
    return folder / f"epoch{epoch}.weights.{server}.npy"


def _get_buffers_path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch{epoch}.buffers.npy"


def _get_completion_mark_path(folder: Path, epoch: int, server: int) -> Path:
    return folder / f"epoch{epoch}.{server}.json"


def _write_tensor(path: Path, tensor: Tensor) -> None:
    """Write a tensor as bytes. The JSON file names the dtype, because NumPy has no bfloat16.

    The function does not use `np.save`, whose error on a full disk does not name the reason.
    """
    partial = path.with_suffix(".part")
    header = {"descr": "|u1", "fortran_order": False, "shape": (get_tensor_bytes(tensor).nbytes,)}
    try:
        with partial.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.write(get_tensor_bytes(tensor))
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _read_tensor(path: Path, dtype: str) -> Tensor:
    return torch.from_numpy(np.load(path, allow_pickle=False)).view(DTYPES[dtype])


class SnapshotWriter:
    """Copies and writes snapshots in a thread of its own."""

    def __init__(
        self,
        folder: str | Path,
        server: int,
        n_servers: int,
        on_failure: Callable[[str], None],
    ) -> None:
        """Start the thread that writes snapshots.

        Args:
            folder: Folder for the snapshots.
            server: Number of the server.
            n_servers: Number of servers.
            on_failure: Called from the thread with the reason if a snapshot cannot be written.
        """
        self.folder, self._on_failure = Path(folder), on_failure
        self.folder.mkdir(parents=True, exist_ok=True)
        self._server, self._n_servers = server, n_servers
        self._snapshot_requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._write_requested_snapshots, name="snapshots", daemon=True
        )
        self._thread.start()

    def request_snapshot(
        self, epoch: int, end_s: float, shards: list[Shard], buffers: Tensor | None
    ) -> None:
        """Request a snapshot of the present weights, and return at once.

        Args:
            epoch: Number of the epoch.
            end_s: Seconds from the first ticket to the end of the epoch.
            shards: Shards of the server.
            buffers: Averaged buffers, or None.
        """
        numel = sum(shard.policy.weights.numel() for shard in shards)
        weights = torch.empty(numel, dtype=shards[0].policy.weights.dtype)
        start = 0
        for shard in shards:
            stop = start + shard.policy.weights.numel()
            shard.request_snapshot(weights[start:stop])
            start = stop
        self._snapshot_requests.put((epoch, end_s, shards, weights, buffers))

    def wait_for_snapshots(self) -> None:
        """Wait until all snapshots that were requested so far are on the disk."""
        done = threading.Event()
        self._snapshot_requests.put(done)
        done.wait()

    def close(self) -> None:
        """Wait until all snapshots are on the disk, and end the thread."""
        self._snapshot_requests.put(None)
        self._thread.join()

    def _write_requested_snapshots(self) -> None:
        while (item := self._snapshot_requests.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            epoch, end_s, shards, weights, buffers = item
            try:
                for shard in shards:
                    shard.save_snapshots()
                self._write_snapshot(epoch, end_s, weights, buffers)
            # Report any error and continue: `wait_for_snapshots` would wait forever for an ended thread.
            except Exception as error:
                cause = getattr(error, "strerror", None) or error
                reason = f"the snapshot of epoch {epoch + 1} could not be written to {self.folder}"
                self._on_failure(f"{reason}: {cause}")

    def _write_snapshot(
        self, epoch: int, end_s: float, weights: Tensor, buffers: Tensor | None
    ) -> None:
        _write_tensor(_get_weights_path(self.folder, epoch, self._server), weights)
        notice = {
            "epoch": epoch,
            "seconds": end_s,
            "n_servers": self._n_servers,
            "dtype": get_dtype_name(weights.dtype),
            "buffer_dtype": None,
        }
        if buffers is not None:
            _write_tensor(_get_buffers_path(self.folder, epoch), buffers)
            notice["buffer_dtype"] = get_dtype_name(buffers.dtype)
        write_text_atomically(
            _get_completion_mark_path(self.folder, epoch, self._server), json.dumps(notice)
        )


class Snapshot(NamedTuple):
    """The servers' state at the end of an epoch, with the seconds from the first ticket to this end.

    `weights` has the shape [numel], and `buffers` the shape [buffer_numel]. `buffers` is None if the model
    has no float buffers.
    """

    end_s: float
    weights: Tensor
    buffers: Tensor | None


def load_snapshot(folder: str | Path, epoch: int, wait_s: float = 0.0) -> Snapshot:
    """Return the snapshot that the servers wrote at the end of an epoch.

    Args:
        folder: Folder of the snapshots.
        epoch: Number of the epoch, from 0.
        wait_s: Maximum seconds to wait until the servers have written the snapshot.

    Raises:
        FileNotFoundError: If the snapshot is not complete after `wait_s` seconds.
    """
    folder, deadline = Path(folder), time.monotonic() + wait_s
    notices, n_servers = [], 1
    while len(notices) < n_servers:
        path = _get_completion_mark_path(folder, epoch, len(notices))
        if path.exists():
            notices.append(json.loads(path.read_text(encoding="utf-8")))
            n_servers = notices[0]["n_servers"]
        elif time.monotonic() > deadline:
            raise FileNotFoundError(f"epoch {epoch} has no complete snapshot: {path} is missing")
        else:
            time.sleep(0.02)
    first = notices[0]
    parts = [
        _read_tensor(_get_weights_path(folder, epoch, s), first["dtype"]) for s in range(n_servers)
    ]
    buffers = None
    if first["buffer_dtype"] is not None:
        buffers = _read_tensor(_get_buffers_path(folder, epoch), first["buffer_dtype"])
    return Snapshot(first["seconds"], torch.cat(parts), buffers)


def delete_later_snapshots(folder: str | Path, server: int, epochs: int) -> None:
    """Delete the snapshots of a server, except those of the first `epochs` epochs.

    A restarted server calls this function, because it trains the later epochs again.

    Args:
        folder: Folder of the snapshots.
        server: Number of the server.
        epochs: Number of epochs to keep.
    """
    for path in Path(folder).glob(f"epoch*.{server}.json"):
        if int(path.name.removeprefix("epoch").partition(".")[0]) >= epochs:
            path.unlink(missing_ok=True)


def delete_snapshot(folder: str | Path, epoch: int) -> None:
    """Delete the files of a snapshot that has been loaded.

    The folder stays for later snapshots.
    """
    for path in Path(folder).glob(f"epoch{epoch}.*"):
        path.unlink(missing_ok=True)
