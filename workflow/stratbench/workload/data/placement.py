"""Fetches batches from host memory to the device in advance, in a thread of the worker."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    Inputs = torch.Tensor
    Targets = torch.Tensor
    AugmentationRows = list[torch.Tensor]

#: Number of batches on the device at a time: the current one and the next one.
BUFFERED_BATCHES = 2


class _BatchBuffers:
    """The buffers of one batch, and the CUDA events after which they may be overwritten.

    `staged` are in pinned host memory, `arrived` on the device. `used` is recorded when the device has used
    the batch, `copied` when the copy is complete.
    """

    def __init__(self) -> None:
        self.staged: list[torch.Tensor] = []
        self.arrived: list[torch.Tensor] = []
        self.used: torch.cuda.Event | None = None
        self.copied: torch.cuda.Event | None = None


class _FetchedBatch(NamedTuple):
    """A batch that is being fetched from host memory.

    Attributes:
        indices: Indices of the samples.
        tables: Augmentation tables whose rows are fetched with the samples, if any.
        slot: Buffers of the batch.
        done: Completes when the rows are gathered.
    """

    indices: torch.Tensor
    tables: Sequence[torch.Tensor] | None
    slot: _BatchBuffers
    done: Future[None]


class HostRows:
    """Fetches batches of a data set from arrays in host memory to a device, one batch in advance.

    While the device computes, a thread gathers the rows into pinned memory, and copies them on a stream of
    its own. In `take_fetched_batch`, the current stream waits for the copy, and the host for the gathering
    only. On a CPU nothing is copied: the thread gathers into one of two buffers.
    """

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, device: torch.device) -> None:
        """Start the thread that fetches batches.

        Args:
            inputs: Inputs [N, ...] in host memory, which may be mapped from files.
            targets: Targets [N, ...] in host memory, which may be mapped from files.
            device: Device of the batches.
        """
        import torch

        self._arrays = inputs, targets
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None
        self._slots = [_BatchBuffers() for _ in range(BUFFERED_BATCHES)]
        self._turn = 0
        self._coming: _FetchedBatch | None = None
        # Gathering uses one core only, to leave the other cores to the training.
        self._start_thread = ThreadPoolExecutor(
            1, "stratbench-rows", initializer=torch.set_num_threads, initargs=(1,)
        )

    def begin_fetching_batch(
        self, indices: torch.Tensor, augmentation_tables: Sequence[torch.Tensor] | None
    ) -> None:
        """Begin to fetch a batch: the samples' inputs, targets and augmentation.

        The new batch overwrites the batch that was fetched two calls before. So all work on that batch must
        have been queued.

        Args:
            indices: Indices of the rows, int64 [b] in host memory.
            augmentation_tables: Augmentation tables, if any.
        """
        import torch

        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % BUFFERED_BATCHES
        sources = [*self._arrays, *(augmentation_tables or ())]
        if len(slot.staged) != len(sources) or len(slot.staged[0]) != len(indices):
            self._allocate_batch_buffers(slot, sources, len(indices))
        if self._on_cuda:
            slot.used = torch.cuda.Event()
            slot.used.record(torch.cuda.current_stream(self._device))
        done = self._start_thread.submit(self._gather_batch_rows, slot, sources, indices)
        self._coming = _FetchedBatch(indices, augmentation_tables, slot, done)

    def take_fetched_batch(
        self, indices: torch.Tensor, augmentation_tables: Sequence[torch.Tensor] | None
    ) -> tuple[Inputs, Targets, AugmentationRows | None]:
        """Return a batch on the device: its inputs, its targets and its augmentation, if any.

        The batch is fetched now if it was not fetched in advance. The second fetch after this call overwrites
        the batch.

        Args:
            indices: Indices of the rows, int64 [b] in host memory.
            augmentation_tables: Augmentation tables, if any.
        """
        import torch

        coming = self._coming
        if (
            coming is None
            or coming.tables is not augmentation_tables
            or not torch.equal(coming.indices, indices)
        ):
            self.begin_fetching_batch(indices, augmentation_tables)
            coming = self._coming
        self._coming = None
        coming.done.result()
        if self._on_cuda:
            torch.cuda.current_stream(self._device).wait_event(coming.slot.copied)
        inputs, targets, *drawn = coming.slot.arrived
        return inputs, targets, drawn or None

    def _allocate_batch_buffers(
        self, buffers: _BatchBuffers, arrays: Sequence[torch.Tensor], samples: int
    ) -> None:
        """Allocate the buffers of a batch again, for another number of samples."""
        import torch

        if self._coming is not None:
            self._coming.done.result()
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        buffers.staged = [
            torch.empty((samples, *s.shape[1:]), dtype=s.dtype, pin_memory=self._on_cuda)
            for s in arrays
        ]
        buffers.arrived = buffers.staged
        if self._on_cuda:
            buffers.arrived = [torch.empty_like(t, device=self._device) for t in buffers.staged]
        buffers.copied = None

    def _gather_batch_rows(
        self, buffers: _BatchBuffers, arrays: Sequence[torch.Tensor], indices: torch.Tensor
    ) -> None:
        """Copy the samples of a batch into its host buffers. Then start the copy to the device."""
        import torch

        if buffers.copied is not None:
            # The previous batch in these host buffers must have been copied to the device.
            buffers.copied.synchronize()
        for source, staged in zip(arrays, buffers.staged, strict=True):
            torch.index_select(source, 0, indices, out=staged)
        if self._on_cuda:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(buffers.used)
                for staged, arrived in zip(buffers.staged, buffers.arrived, strict=True):
                    arrived.copy_(staged, non_blocking=True)
                buffers.copied = torch.cuda.Event()
                buffers.copied.record(self._stream)
