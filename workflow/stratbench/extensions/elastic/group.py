"""The process group of a generation: formed through files of its owner, and broken up.

gloo's operations cannot be interrupted: to free a member that waits for a lost one, the group's connections
are shut down beneath it. NCCL has an abort of its own.
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

from stratbench.workload.torch_internals import abort_collectives, limit_collectives

log = logging.getLogger(__name__)

#: How long members wait for one another to form a group, and within a collective, in seconds.
FORM_S, COLLECTIVE_S = 30.0, 600.0
#: Most bytes that are sent at once.
_SENT_BYTES = 64 << 20
#: The group that this process left last. DDP's reducer holds its group, too, and were it the last to do so,
#: PyTorch would join the group's threads with the interpreter's lock held, for which one of them may wait.
_left: list[dist.ProcessGroup | None] = []


class ElasticGroup:
    """This process's successive default process groups."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """`folder`: where the members of a generation meet; all of them see it."""
        self._folder, self._device = folder, device
        self._connected: list[int] = []
        #: Whether it was broken up: what its collectives gave since then, and a device's, counts for nothing.
        self.broken = False

    def form_alone(self) -> None:
        """A group of this process, for what it does before it meets the others."""
        self._init(dist.HashStore(), 0, 1)

    def form(self, meeting: str, rank: int, world: int) -> None:
        """Join the other members by the name of a file.

        Raises RuntimeError if they do not come.

        Args:
            meeting: Name of the file.
            rank: Rank in the generation.
            world: Number of its members.
        """
        self.dissolve()
        self.broken = False
        path = self._folder / f"meeting-{meeting}"
        # Whoever could write it could take part.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        before = _sockets()
        self._init(dist.FileStore(os.fspath(path), world), rank, world)
        self._connected = sorted(_sockets() - before)
        if rank == 0:  # all have met: the first collective is behind them
            path.unlink(missing_ok=True)

    def _init(self, store: dist.Store, rank: int, world: int) -> None:
        on_cuda = self._device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=FORM_S),
        )
        dist.all_reduce(torch.zeros(1))
        if on_cuda:  # NCCL connects with its first collective
            dist.all_reduce(torch.zeros(1, device=self._device))
        limit_collectives(timedelta(seconds=COLLECTIVE_S))

    def dissolve(self) -> None:
        """Leave the group, whatever its state."""
        self._connected = []
        if dist.is_initialized():
            _left[:] = [dist.group.WORLD]
            dist.destroy_process_group()

    def check(self) -> None:
        """Raise RuntimeError if it was broken up: a device's collective then ends without an error."""
        if self.broken:
            raise RuntimeError("the process group was broken up")

    def break_up(self) -> None:
        """Make the collective fail in which this process waits. Called from another thread."""
        self.broken = True
        for number in self._connected:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # gloo's listener must not be shut: it would end the process
                connection.shutdown(socket.SHUT_RDWR)
        if self._device.type == "cuda" and dist.is_initialized():
            try:
                abort_collectives()
            except RuntimeError:  # the collective then fails at its own time limit
                log.exception("NCCL's operations could not be ended")


def broadcast(tensors: list[Tensor]) -> None:
    """Have all members hold what the first rank holds."""
    for tensors_of_kind in _in_parts(tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in tensors_of_kind])
        dist.broadcast(flat, src=0)
        for tensor, part in zip(
            tensors_of_kind, flat.split([t.numel() for t in tensors_of_kind]), strict=True
        ):
            tensor.detach().copy_(part.view_as(tensor))


def _in_parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device together, up to _SENT_BYTES."""
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


def _sockets() -> set[int]:
    """Return the descriptors of this process's sockets."""
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    numbers = set()
    for entry in os.listdir(folder):
        with suppress(OSError):
            if os.readlink(folder / entry).startswith("socket:"):
                numbers.add(int(entry))
    return numbers
