"""Forms the process group of elastic workers, and breaks it up if one is lost.

Operations of gloo cannot be interrupted. To free a member that waits for a lost one, the sockets of the group
are shut down. NCCL has a function that aborts its operations.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stratbench.workload.torch_internals import abort_collectives, set_collective_timeout

log = logging.getLogger(__name__)

#: Time limit in seconds for members to form a process group.
FORM_S = 30.0
#: Time limit in seconds for a collective.
COLLECTIVE_S = 600.0
#: Maximum number of bytes per broadcast.
_SENT_BYTES = 64 << 20
#: The process group that this process left last. If DDP's reducer had the last reference to it, PyTorch would
#: join the group's threads while it holds the interpreter lock, which can deadlock.
_last_group: list[dist.ProcessGroup | None] = []


class ElasticGroup:
    """The default process group of a worker, formed again when workers join or leave."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Prepare to form groups through files in `folder`, which all members can write."""
        self._folder, self._device = folder, device
        self._connected: list[int] = []
        #: Whether the group was broken up, so that results of its collectives are invalid.
        self.broken = False

    def form_single_member_group(self) -> None:
        """Form a process group of this worker alone, in which it warms up."""
        self._init_process_group(dist.HashStore(), 0, 1)

    def form_group(self, meeting_name: str, rank: int, num_members: int) -> None:
        """Form a process group with the other workers of a generation.

        Args:
            meeting_name: Name of the file through which the members connect.
            rank: Rank of this worker in the generation.
            num_members: Number of members.

        Raises:
            RuntimeError: If a member does not connect in time.
        """
        self.leave_group()
        self.broken = False
        path = self._folder / f"meeting-{meeting_name}"
        # Only this user may write the file, because a process that can write it could join the group.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        before = _list_socket_descriptors()
        self._init_process_group(dist.FileStore(os.fspath(path), num_members), rank, num_members)
        self._connected = sorted(_list_socket_descriptors() - before)
        # The file is no longer needed, because all members have connected in their first collective.
        if rank == 0:
            path.unlink(missing_ok=True)

    def _init_process_group(self, store: dist.Store, rank: int, num_members: int) -> None:
        on_cuda = self._device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=num_members,
            timeout=timedelta(seconds=FORM_S),
        )
        dist.all_reduce(torch.zeros(1))
        if on_cuda:  # NCCL connects the members in its first collective
            dist.all_reduce(torch.zeros(1, device=self._device))
        set_collective_timeout(timedelta(seconds=COLLECTIVE_S))

    def leave_group(self) -> None:
        """Leave the process group, even if the group is broken."""
        self._connected = []
        if dist.is_initialized():
            _last_group[:] = [dist.group.WORLD]
            dist.destroy_process_group()

    def check_group_intact(self) -> None:
        """Raise RuntimeError if the process group was broken up.

        Collectives on a GPU raise no error themselves.
        """
        if self.broken:
            raise RuntimeError("the process group was broken up, because another worker was lost")

    def break_up_group(self) -> None:
        """Make the main thread's present collective fail. Call this method on another thread."""
        self.broken = True
        for number in self._connected:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                # Raises OSError for gloo's listening socket, whose shutdown would kill the process.
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
        if self._device.type == "cuda" and dist.is_initialized():
            try:
                abort_collectives()
            # Without the abort, the collective ends only at its time limit.
            except RuntimeError:
                log.exception("NCCL's operations could not be ended")


def broadcast_from_rank_zero(tensors: list[Tensor]) -> None:
    """Overwrite each member's tensors by those of rank 0."""
    for tensors_of_kind in _iter_tensor_chunks(tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in tensors_of_kind])
        dist.broadcast(flat, src=0)
        for tensor, part in zip(
            tensors_of_kind, flat.split([t.numel() for t in tensors_of_kind]), strict=True
        ):
            tensor.detach().copy_(part.view_as(tensor))


def _iter_tensor_chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield chunks of tensors with the same dtype and device.

    A chunk has at most _SENT_BYTES, unless a single tensor is larger.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for tensors_of_kind in kinds.values():
        part: list[Tensor] = []
        for tensor in tensors_of_kind:
            if part and sum(t.nbytes for t in part) + tensor.nbytes > _SENT_BYTES:
                yield part
                part = []
            part.append(tensor)
        yield part


def _list_socket_descriptors() -> set[int]:
    """Return the file descriptors of this process's sockets."""
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    numbers = set()
    for entry in os.listdir(folder):
        with suppress(OSError):
            if os.readlink(folder / entry).startswith("socket:"):
                numbers.add(int(entry))
    return numbers
