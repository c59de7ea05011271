"""Writes and reads checkpoints: files of a line of JSON and raw tensors, without pickle.

The line of JSON has the metadata: the types and shapes of the tensors, checksums and other values. A file
`checkpoint-<step>.bin` appears when it is complete. Earlier checkpoints are deleted after that.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from stratbench.cell.files import replace_file_atomically

# The launcher of a cell uses this module too, and does not import PyTorch.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Largest length of a checkpoint's first line, which is JSON, in bytes.
_MAX_HEADER_BYTES = 16 << 20
_NAME = re.compile(r"checkpoint-(\d+)\.bin")
#: Name of an unfinished checkpoint, which remains if its writer is killed.
_UNFINISHED_NAME = re.compile(r"\.[0-9a-f]+\." + _NAME.pattern)


class DamagedCheckpoint(ValueError):
    """A checkpoint is damaged, or its tensors are those of another model."""


def _view_tensor_as_bytes(tensor: Tensor) -> memoryview:
    from stratbench.workload.flat import get_tensor_bytes

    return get_tensor_bytes(tensor.reshape(-1))


def list_checkpoint_steps(folder: Path) -> set[int]:
    """Return the steps after which the checkpoints in a folder were written."""
    return {int(match[1]) for p in folder.glob("*.bin") if (match := _NAME.fullmatch(p.name))}


def get_checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / f"checkpoint-{step}.bin"


def write_checkpoint(
    folder: Path, step: int, tensors: Sequence[Tensor], metadata: dict[str, Any] | None = None
) -> None:
    """Write a checkpoint with tensors that are in host memory.

    Args:
        folder: Folder of the checkpoints.
        step: Number of steps after which the tensors were saved.
        tensors: Tensors to write.
        metadata: Other values to write, which JSON can store.
    """
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(_view_tensor_as_bytes(tensor), checksum)
    head = {
        "step": step,
        "crc32": checksum,
        "tensors": [[str(t.dtype), list(t.shape)] for t in tensors],
        "facts": metadata or {},
        "facts_crc32": _compute_metadata_crc(metadata or {}),
    }
    with (
        replace_file_atomically(get_checkpoint_path(folder, step)) as temporary,
        temporary.open("xb") as file,
    ):
        file.write(json.dumps(head).encode() + b"\n")
        for tensor in tensors:
            file.write(_view_tensor_as_bytes(tensor))
        file.flush()
        # The file must survive a crash of the node, because earlier checkpoints are deleted afterwards.
        os.fsync(file.fileno())


def delete_checkpoints(folder: Path, before_step: float = math.inf) -> None:
    """Delete the checkpoints of a folder that were written before a step.

    By default, delete all checkpoints and unfinished files.
    """
    for path in folder.glob("*.bin"):
        match = _NAME.fullmatch(path.name)
        is_unfinished = match is None and _UNFINISHED_NAME.fullmatch(path.name)
        if int(match[1]) < before_step if match else before_step == math.inf and is_unfinished:
            path.unlink(missing_ok=True)


def delete_later_checkpoints(folder: Path, step: int) -> None:
    """Delete the checkpoints of a folder after a step, and unfinished files of killed writers."""
    for path in folder.glob("*.bin"):
        match = _NAME.fullmatch(path.name)
        if int(match[1]) > step if match else _UNFINISHED_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


def read_checkpoint_metadata(folder: Path, step: int) -> dict[str, Any]:
    """Return a checkpoint's metadata: its values other than tensors.

    Raises:
        DamagedCheckpoint: The metadata are damaged.
    """
    path = get_checkpoint_path(folder, step)
    with path.open("rb") as file:
        return _read_checkpoint_header(file, path)["facts"]


def _read_checkpoint_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    try:
        head = json.loads(file.readline(_MAX_HEADER_BYTES))
        whole = head["facts_crc32"] == _compute_metadata_crc(head["facts"])
        head = {key: head[key] for key in ("tensors", "crc32", "facts")}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} has an unreadable first line: {error}") from None
    if not whole:
        raise DamagedCheckpoint(f"{path}: its metadata were changed after they were written")
    return head


def _compute_metadata_crc(metadata: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(metadata).encode())


def read_checkpoint_into_tensors(folder: Path, step: int, tensors: Sequence[Tensor]) -> None:
    """Copy the tensors of a checkpoint into existing tensors.

    Args:
        folder: Folder of the checkpoints.
        step: Number of steps after which the checkpoint was written.
        tensors: Tensors to overwrite.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged, or its tensors have other shapes or types. No tensor was
            changed.
    """
    import torch

    path = get_checkpoint_path(folder, step)
    with path.open("rb") as file:
        head = _read_checkpoint_header(file, path)
        if head["tensors"] != [[str(t.dtype), list(t.shape)] for t in tensors]:
            raise DamagedCheckpoint(f"{path} has tensors of other shapes or types than this model")
        copies, checksum = [], 0
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            if file.readinto(_view_tensor_as_bytes(copy)) != copy.nbytes:
                raise DamagedCheckpoint(
                    f"{path} is incomplete: it is shorter than its first line says"
                )
            checksum = zlib.crc32(_view_tensor_as_bytes(copy), checksum)
            copies.append(copy)
    if checksum != head["crc32"]:
        raise DamagedCheckpoint(f"{path} was changed after it was written: its checksum is wrong")
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)


@contextmanager
def delete_checkpoint_if_damaged(folder: Path, step: int) -> Iterator[None]:
    """Context that deletes a checkpoint if the code within it raises DamagedCheckpoint.

    Args:
        folder: Folder of the checkpoints.
        step: Number of steps after which the checkpoint was written.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged or does not exist.
    """
    path = get_checkpoint_path(folder, step)
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} was deleted") from error
    except DamagedCheckpoint:
        path.unlink(missing_ok=True)
        raise


class AsyncCheckpointWriter:
    """Writes checkpoints on another thread, from copies of the tensors in host memory."""

    def __init__(
        self,
        folder: Path,
        clean_up: Callable[[Path, int], None] = delete_checkpoints,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        """Set the folder, and what happens before and after each checkpoint.

        Args:
            folder: Folder of the checkpoints.
            clean_up: Deletes older checkpoints, given the folder and the step of the newest one.
            counts: Returns whether the GPU's results so far are valid. If not, no checkpoint is written.
        """
        self._folder, self._clean_up, self._counts = folder, clean_up, counts
        self._copies: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        #: For each checkpoint: seconds for which the training waited.
        self.held_up_s: list[float] = []
        #: For each checkpoint: seconds of writing.
        self.written_s: list[float] = []

    def wait_for_checkpoint_write(self) -> None:
        """Wait until the current checkpoint is on disk. If its write failed, raise the error."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def start_checkpoint_write_unless_busy(
        self,
        step: int,
        tensors: Sequence[Tensor],
        wait: bool = False,
        constant_tensors: Sequence[Tensor] = (),
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Copy tensors to host memory, and start to write them as a checkpoint.

        Nothing happens while the previous checkpoint is still being written, unless `wait` is true. If the
        write of an earlier checkpoint failed, raise its error.

        Args:
            step: Number of steps after which the checkpoint is written.
            tensors: Tensors to copy and write.
            wait: Whether to wait until the checkpoint is on disk.
            constant_tensors: Tensors in host memory that do not change, and are written without a copy.
            metadata: Other values to write, which JSON can store.
        """
        import torch

        if self._thread is not None and self._thread.is_alive() and not wait:
            return
        self.wait_for_checkpoint_write()
        began = time.perf_counter()
        on_cuda = tensors[0].device.type == "cuda"
        if not self._copies:
            self._copies = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=t.device.type == "cuda")
                for t in tensors
            ]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        event = torch.cuda.Event() if on_cuda else None
        if event is not None:
            event.record()
        self._thread = threading.Thread(
            target=self._write_copies_to_disk,
            args=(step, event, constant_tensors, metadata),
            daemon=True,
        )
        self._thread.start()
        self.held_up_s.append(time.perf_counter() - began)
        if wait:
            self.wait_for_checkpoint_write()

    def _write_copies_to_disk(
        self,
        step: int,
        event: torch.cuda.Event | None,
        constant_tensors: Sequence[Tensor],
        metadata: dict[str, Any] | None,
    ) -> None:
        began = time.perf_counter()
        try:
            if event is not None:
                event.synchronize()
                if not self._counts():
                    return
            write_checkpoint(self._folder, step, [*self._copies, *constant_tensors], metadata)
            self._clean_up(self._folder, step)
        except Exception as error:
            # An error on this thread would be lost, so another method raises it on the main thread.
            self._error = error
        self.written_s.append(time.perf_counter() - began)
