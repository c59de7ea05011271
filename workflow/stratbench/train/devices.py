"""Which devices a cell uses: GPUs are taken under a file lock, so that no two cells share one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from glob import glob
from typing import TYPE_CHECKING

from stratbench.telemetry.cores import usable_cores
from stratbench.train.locks import own_folder, try_lock

if TYPE_CHECKING:
    from stratbench.cell.settings import Settings


#: The driver's, one for each GPU.
DEVICE_FILES = "/dev/nvidia[0-9]*"


class DeviceError(RuntimeError):
    """The machine does not have what a cell needs; the message says what to change."""


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    from stratbench.telemetry.nvml import Nvml

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in map(str.strip, given.split(",")) if name not in ("", "-1")]
    return [str(gpu.index) for gpu in Nvml().gpus()]


def wants_cuda(device: str, gpus: list[str]) -> bool:
    """Whether a cell with this `device` setting (auto, cpu, cuda) trains on the GPUs that are here.

    Raises DeviceError if it asks for GPUs and none can be used.
    """
    if device == "cuda" and not gpus:
        raise DeviceError(
            "device = 'cuda', but no GPU is visible here; use device: auto or cpu, or check "
            "CUDA_VISIBLE_DEVICES and the driver"
        )
    if device == "auto" and not gpus and (why := unseen_gpu()):
        raise DeviceError(
            f"device = 'auto', but {why}; install the driver's NVML library and nvidia-ml-py, or say "
            "device: cpu to train on the CPU of a machine with a GPU"
        )
    return device != "cpu" and bool(gpus)


def unseen_gpu() -> str | None:
    """Why a GPU that seems to be here cannot be used; None if there is none, or if it is hidden."""
    from stratbench.telemetry.nvml import Nvml

    files = sorted(glob(DEVICE_FILES))
    if not files or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    reason = Nvml().reason
    return reason and f"{files[0]} is there and NVML does not answer ({reason})"


@contextmanager
def reserve(gpus: list[str], wanted: int) -> Iterator[list[str]]:
    """Hold `wanted` of `gpus` until the block ends, waiting for other cells on this node.

    The locks lie in the user's own folder on this node and vanish with the process: a killed cell
    leaves none behind, and no other user can hold one. Raises DeviceError when the node has too few.
    """
    if wanted > len(gpus):
        raise DeviceError(
            f"the cell needs {wanted} GPUs on this node, but {len(gpus)} are visible "
            f"({', '.join(gpus) or 'none'}); lower `gpus` in the experiment, use device: cpu, or "
            "raise cluster.gpus_per_node to what a node has"
        )
    if not wanted:
        yield []
        return
    folder = own_folder()
    locks = {gpu: folder / f"gpu-{name}" for gpu, name in lock_names(gpus).items()}
    with ExitStack() as held:
        mine: list[str] = []
        told = False
        while len(mine) < wanted:
            for gpu in gpus:
                if gpu in mine or len(mine) == wanted:
                    continue
                if (descriptor := try_lock(locks[gpu])) is not None:
                    held.callback(os.close, descriptor)
                    mine.append(gpu)
            if len(mine) < wanted:
                # Give back what was taken: two cells that each hold half would wait for ever.
                held.close()
                mine.clear()
                if not told:
                    print(f"waiting for {wanted} free GPUs (another cell holds some)", flush=True)
                    told = True
                time.sleep(0.5)
        yield mine


def lock_names(gpus: list[str]) -> dict[str, str]:
    """A file name for each GPU: its UUID where NVML knows it.

    A scheduler may show every job its own GPU as number 0; the numbers of two jobs say nothing.
    """
    from stratbench.telemetry.nvml import Nvml

    uuids = {str(gpu.index): gpu.static().get("uuid") for gpu in Nvml().gpus()}
    return {gpu: (uuids.get(gpu) or gpu).replace("/", "_") for gpu in gpus}


def show_only(gpus: list[str]) -> None:
    """Make `gpus` the only ones that this process's children see, as devices 0, 1, …"""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def threads_of(settings: Settings, workers: int) -> int:
    """CPU threads of each of `workers` on this node: as configured, or else their share of its cores."""
    return settings.threads or max(1, len(usable_cores()) // workers)
