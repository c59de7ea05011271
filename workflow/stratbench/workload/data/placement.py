"""Data in host memory: a thread gathers the rows of a batch, and copies them ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

#: Batches on the device at a time: the one that is trained on, and the next, which is on its way.
BUFFERED_BATCHES = 2


class _Slot:
    """Buffers of one batch: pinned host memory, the same on the device, and their next reuse."""

    def __init__(self) -> None:
        self.staged: list[torch.Tensor] = []
        self.arrived: list[torch.Tensor] = []
        self.used: torch.cuda.Event | None = None
        self.copied: torch.cuda.Event | None = None


class _Coming(NamedTuple):
    """A batch that is being fetched: which samples, by which tables, into which slot."""

    indices: torch.Tensor
    tables: Sequence[torch.Tensor] | None
    slot: _Slot
    done: Future[None]


class HostRows:
    """Rows of arrays in host memory, by number, on a device: one batch ahead.

    A thread gathers them into pinned memory and copies them on a stream of its own, while the device
    computes. `take` lets the current stream wait for the copy, and the host for the gathering only. On a
    CPU nothing is copied: the thread gathers into one of two buffers.
    """

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, device: torch.device) -> None:
        """`inputs`, `targets`: [N, ...] in host memory, which may be mapped from files."""
        import torch

        self._arrays = inputs, targets
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None
        self._slots = [_Slot() for _ in range(BUFFERED_BATCHES)]
        self._turn = 0
        self._coming: _Coming | None = None
        # One thread of one core: gathering must not take those of the training.
        self._thread = ThreadPoolExecutor(
            1, "stratbench-rows", initializer=torch.set_num_threads, initargs=(1,)
        )

    def fetch(self, indices: torch.Tensor, tables: Sequence[torch.Tensor] | None) -> None:
        """Begin to fetch the rows `indices` (int64 [b], on the host), and those of `tables`.

        The rows taken two fetches before are overwritten: all work on them must have been queued.
        """
        import torch

        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % BUFFERED_BATCHES
        sources = [*self._arrays, *(tables or ())]
        if len(slot.staged) != len(sources) or len(slot.staged[0]) != len(indices):
            self._make_room(slot, sources, len(indices))
        if self._on_cuda:
            slot.used = torch.cuda.Event()
            slot.used.record(torch.cuda.current_stream(self._device))
        done = self._thread.submit(self._gather, slot, sources, indices)
        self._coming = _Coming(indices, tables, slot, done)

    def take(
        self, indices: torch.Tensor, tables: Sequence[torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor] | None]:
        """Inputs, targets and the rows of `tables`, on the device.

        As fetched, or else fetched now.

        They are overwritten by the next `fetch` but one.
        """
        import torch

        coming = self._coming
        if (
            coming is None
            or coming.tables is not tables
            or not torch.equal(coming.indices, indices)
        ):
            self.fetch(indices, tables)
            coming = self._coming
        self._coming = None
        coming.done.result()
        if self._on_cuda:
            torch.cuda.current_stream(self._device).wait_event(coming.slot.copied)
        inputs, targets, *drawn = coming.slot.arrived
        return inputs, targets, drawn or None

    def _make_room(self, slot: _Slot, sources: Sequence[torch.Tensor], samples: int) -> None:
        """Buffers of another size: rare, since all batches of a training are of one."""
        import torch

        if self._coming is not None:
            self._coming.done.result()
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        slot.staged = [
            torch.empty((samples, *s.shape[1:]), dtype=s.dtype, pin_memory=self._on_cuda)
            for s in sources
        ]
        slot.arrived = slot.staged
        if self._on_cuda:
            slot.arrived = [torch.empty_like(t, device=self._device) for t in slot.staged]
        slot.copied = None

    def _gather(self, slot: _Slot, sources: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Gather rows, on the thread."""
        import torch

        if slot.copied is not None:
            slot.copied.synchronize()  # of the batch before in this slot; this thread waits, no other
        for source, staged in zip(sources, slot.staged, strict=True):
            torch.index_select(source, 0, indices, out=staged)
        if self._on_cuda:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(slot.used)
                for staged, arrived in zip(slot.staged, slot.arrived, strict=True):
                    arrived.copy_(staged, non_blocking=True)
                slot.copied = torch.cuda.Event()
                slot.copied.record(self._stream)
