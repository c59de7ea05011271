"""Checkpoints of a training: raw tensors after a line of JSON; nothing is ever unpickled.

`checkpoint-<step>.bin` appears complete or not at all. Earlier ones are deleted after that.
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

from stratbench.cell.files import replacing

if TYPE_CHECKING:  # the launcher looks for checkpoints, and does without PyTorch
    import torch
    from torch import Tensor

#: The longest line of JSON that is read, in bytes.
_HEAD_BYTES = 16 << 20
_NAME = re.compile(r"checkpoint-(\d+)\.bin")
#: One that is being written, or was when its writer was killed.
_PART = re.compile(r"\.[0-9a-f]+\." + _NAME.pattern)


class Damaged(ValueError):
    """A checkpoint is not what was written, or of another network."""


def _raw(tensor: Tensor) -> memoryview:
    from stratbench.workload.flat import as_bytes

    return as_bytes(tensor.reshape(-1))


def steps_in(folder: Path) -> set[int]:
    """After how many steps each checkpoint in a folder was taken."""
    return {int(match[1]) for p in folder.glob("*.bin") if (match := _NAME.fullmatch(p.name))}


def path_of(folder: Path, step: int) -> Path:
    """Return the file of the checkpoint after `step` steps."""
    return folder / f"checkpoint-{step}.bin"


def write(
    folder: Path, step: int, tensors: Sequence[Tensor], facts: dict[str, Any] | None = None
) -> None:
    """Write tensors in host memory to a checkpoint.

    Args:
        folder: Folder of the checkpoints.
        step: Step of the state.
        tensors: Tensors to write as they are now.
        facts: Further data that JSON can hold.
    """
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(_raw(tensor), checksum)
    head = {
        "step": step,
        "crc32": checksum,
        "tensors": [[str(t.dtype), list(t.shape)] for t in tensors],
        "facts": facts or {},
        "facts_crc32": _crc_of(facts or {}),
    }
    with replacing(path_of(folder, step)) as temporary, temporary.open("xb") as file:
        file.write(json.dumps(head).encode() + b"\n")
        for tensor in tensors:
            file.write(_raw(tensor))
        file.flush()
        os.fsync(file.fileno())  # the ones before are deleted now, and this node may be lost


def forget(folder: Path, below: float = math.inf) -> None:
    """Delete the checkpoints after fewer than `below` steps.

    All of them with what killed writers left.
    """
    for path in folder.glob("*.bin"):
        match = _NAME.fullmatch(path.name)
        if int(match[1]) < below if match else below == math.inf and _PART.fullmatch(path.name):
            path.unlink(missing_ok=True)


def forget_beyond(folder: Path, step: int) -> None:
    """Delete the checkpoints after more than `step` steps, and what killed writers left."""
    for path in folder.glob("*.bin"):
        match = _NAME.fullmatch(path.name)
        if int(match[1]) > step if match else _PART.fullmatch(path.name):
            path.unlink(missing_ok=True)


def read_facts(folder: Path, step: int) -> dict[str, Any]:
    """Return the data in a checkpoint besides its tensors. Raises Damaged if it cannot be read."""
    path = path_of(folder, step)
    with path.open("rb") as file:
        return _read_head(file, path)["facts"]


def _read_head(file: BinaryIO, path: Path) -> dict[str, Any]:
    try:
        head = json.loads(file.readline(_HEAD_BYTES))
        whole = head["facts_crc32"] == _crc_of(head["facts"])
        head = {key: head[key] for key in ("tensors", "crc32", "facts")}
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: its first line cannot be read: {error}") from None
    if not whole:
        raise Damaged(f"{path}: its facts were changed since they were written")
    return head


def _crc_of(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts).encode())


def read_into(folder: Path, step: int, tensors: Sequence[Tensor]) -> None:
    """Fill tensors from a checkpoint.

    Raises Damaged, before any is changed, if it does not fit.

    Args:
        folder: Folder of the checkpoints.
        step: Step of the state.
        tensors: Tensors to fill.
    """
    import torch

    path = path_of(folder, step)
    with path.open("rb") as file:
        head = _read_head(file, path)
        if head["tensors"] != [[str(t.dtype), list(t.shape)] for t in tensors]:
            raise Damaged(f"{path} holds other tensors than this network's state")
        copies, checksum = [], 0
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            if file.readinto(_raw(copy)) != copy.nbytes:
                raise Damaged(f"{path} is cut off")
            checksum = zlib.crc32(_raw(copy), checksum)
            copies.append(copy)
    if checksum != head["crc32"]:
        raise Damaged(f"{path} was changed since it was written")
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)


@contextmanager
def deleted_if_damaged(folder: Path, step: int) -> Iterator[None]:
    """Delete the checkpoint after `step` if reading it raises Damaged.

    The one before is then used.

    Raises Damaged if there is none left.
    """
    path = path_of(folder, step)
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{path} was deleted") from error
    except Damaged:
        path.unlink(missing_ok=True)
        raise


class Writer:
    """Writes checkpoints on its own thread, from copies that a device makes asynchronously."""

    def __init__(
        self,
        folder: Path,
        clean_up: Callable[[Path, int], None] = forget,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread that writes.

        Args:
            folder: Folder of the checkpoints.
            clean_up: Deletes older checkpoints, given the folder and the step of the newest.
            counts: Returns whether the device's results so far are valid; else nothing is written.
        """
        self._folder, self._clean_up, self._counts = folder, clean_up, counts
        self._copies: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        #: Seconds that the training was held up, and that the writing took, of each checkpoint.
        self.held_up_s: list[float] = []
        self.written_s: list[float] = []

    def settle(self) -> None:
        """Wait for the checkpoint that is being written.

        Raise the error of one that failed, such as OSError.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def take(
        self,
        step: int,
        tensors: Sequence[Tensor],
        wait: bool = False,
        more: Sequence[Tensor] = (),
        facts: dict[str, Any] | None = None,
    ) -> bool:
        """Write the state after `step`; return False if the previous one is still being written.

        Raises as `settle` if an earlier one could not be written.

        Args:
            step: Step of the state.
            tensors: Tensors to copy and write.
            wait: Whether to wait until it is on the disk.
            more: Tensors in host memory that will not change.
            facts: Further data that JSON can hold.
        """
        import torch

        if self._thread is not None and self._thread.is_alive() and not wait:
            return False
        self.settle()
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
            target=self._write, args=(step, event, more, facts), daemon=True
        )
        self._thread.start()
        self.held_up_s.append(time.perf_counter() - began)
        if wait:
            self.settle()
        return True

    def _write(
        self,
        step: int,
        event: torch.cuda.Event | None,
        more: Sequence[Tensor],
        facts: dict[str, Any] | None,
    ) -> None:
        began = time.perf_counter()
        try:
            if event is not None:
                event.synchronize()
                if not self._counts():
                    return
            write(self._folder, step, [*self._copies, *more], facts)
            self._clean_up(self._folder, step)
        except Exception as error:  # nobody else would hear of it
            self._error = error
        self.written_s.append(time.perf_counter() - began)
