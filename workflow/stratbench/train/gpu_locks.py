"""Reservation of a cell's GPUs: under a file lock, so that no two cells share one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from glob import glob
from typing import TYPE_CHECKING

from stratbench.cell.locks import try_lock
from stratbench.telemetry.machine import nvml
from stratbench.telemetry.machine.cores import usable_cores
from stratbench.train.locks import own_folder

if TYPE_CHECKING:
    from stratbench.cell.settings import Settings


#: The driver's, one for each GPU.
DEVICE_FILES = "/dev/nvidia[0-9]*"
VARIABLE = "CUDA_VISIBLE_DEVICES"
#: A GPU's name in it: a number, or the beginning of a UUID.
_NAME = re.compile(r"\d+|(GPU|MIG)-.+")


class DeviceError(RuntimeError):
    """The machine lacks a device that a cell needs; the message says what to change."""


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    As in CUDA, what follows a name that is no GPU's is hidden. Raises DeviceError for a GPU that is
    named twice: CUDA would show none.
    """
    library, visible = nvml.Nvml(), os.environ.get(VARIABLE)
    if visible is None:
        return [str(gpu.index) for gpu in library.gpus()]
    names: dict[str, str] = {}
    for name in _names(visible):
        identity = _identity(name, library)
        if identity is None:
            break
        if identity in names:
            raise DeviceError(
                f"{VARIABLE} = {visible!r} names one GPU twice ({names[identity]} and {name}), for which "
                "CUDA shows none at all; name each GPU once"
            )
        names[identity] = name
    return list(names.values())


def unknown_gpu() -> str | None:
    """Return a text on the entry at which CUDA stops reading CUDA_VISIBLE_DEVICES, or None."""
    library, names = nvml.Nvml(), os.environ.get(VARIABLE, "")
    for name in _names(names):
        if _identity(name, library) is None:
            return f"{name!r} in {VARIABLE} = {names!r} is no GPU of this machine"
    return None


def _names(visible: str) -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES up to -1 or an empty one, which hides the rest."""
    names = [name.strip() for name in visible.split(",")]
    ends = [i for i, name in enumerate(names) if name in ("", "-1")]
    return names[: ends[0]] if ends else names


def _identity(name: str, library: nvml.Nvml) -> str | None:
    """Return a GPU's unique identity whatever it is called, or None for something else.

    It is the UUID. If NVML does not answer or does not know the name, it is whatever the name says.
    """
    if not _NAME.fullmatch(name):
        return None
    if name.isdecimal():
        name = str(int(name))
    # CUDA still knows MIG instances by older names, which begin with their GPU's.
    if library.reason or name.startswith("MIG-GPU-"):
        return name
    return library.uuid_named(name)


def wants_cuda(device: str, gpus: list[str]) -> bool:
    """Return whether a cell with this `device` setting (auto, cpu, cuda) trains on GPUs.

    Raises:
        DeviceError: If it requires GPUs and none can be used, or if a GPU seems to be here but cannot be
            used.
    """
    if device == "cpu" or gpus:
        return device != "cpu"
    problem = unseen_gpu()
    if device == "cuda" and not problem:
        reason, visible = nvml.Nvml().reason, os.environ.get(VARIABLE)
        problem = "no GPU is visible here"
        if visible is not None:
            problem += f" ({unknown_gpu() or f'{VARIABLE} = {visible!r}'})"
        elif reason:
            problem += f" and NVML does not answer ({reason})"
    if problem:
        raise DeviceError(
            f"device = {device!r}, but {problem}; see to {VARIABLE}, the driver, its NVML library and "
            "nvidia-ml-py, or say device: cpu to train on the CPU"
        )
    return False


def unseen_gpu() -> str | None:
    """Return why a visible GPU cannot be used, or None if none is visible."""
    if VARIABLE in os.environ:
        named = _names(os.environ[VARIABLE])[:1]
        return unknown_gpu() if named and _NAME.fullmatch(named[0]) else None
    files, reason = sorted(glob(DEVICE_FILES)), nvml.Nvml().reason
    if not files or reason is None:
        return None
    return f"{files[0]} is there and NVML does not answer ({reason})"


@contextmanager
def reserve(gpus: list[str], wanted: int) -> Iterator[list[str]]:
    """Lock `wanted` of `gpus` until the block ends, waiting for other cells on this node.

    The locks are in the user's own folder on this node and end with the process. A killed cell leaves none
    behind, and no other user can hold one.

    Raises:
        DeviceError: When the node has too few.
    """
    if wanted > len(gpus):
        seen = "; ".join(filter(None, [", ".join(gpus) or "none", unknown_gpu()]))
        raise DeviceError(
            f"the cell needs {wanted} GPUs on this node, but {len(gpus)} are visible ({seen}); "
            "lower `gpus` in the experiment, use device: cpu, or raise cluster.gpus_per_node to what a "
            "node has"
        )
    if not wanted:
        yield []
        return
    folder = own_folder()
    locks = {gpu: folder / f"gpu-{name}" for gpu, name in lock_names(gpus).items()}
    with ExitStack() as held:
        mine: list[str] = []
        announced = False
        while len(mine) < wanted:
            for gpu in gpus:
                if gpu in mine or len(mine) == wanted:
                    continue
                if (descriptor := try_lock(locks[gpu])) is not None:
                    held.callback(os.close, descriptor)
                    mine.append(gpu)
            if len(mine) < wanted:
                # Give back what was taken: two cells that each hold half would wait forever.
                held.close()
                mine.clear()
                if not announced:
                    print(f"waiting for {wanted} free GPUs (another cell holds some)", flush=True)
                    announced = True
                time.sleep(0.5)
        yield mine


def lock_names(gpus: list[str]) -> dict[str, str]:
    """Return a file name for each GPU: its full UUID if NVML knows it.

    A scheduler may show every job its own GPU as number 0, so that numbers of two jobs cannot be compared.
    """
    library = nvml.Nvml()
    return {gpu: (_identity(gpu, library) or gpu).replace("/", "_") for gpu in gpus}


def show_only(gpus: list[str]) -> None:
    """Make only `gpus` visible to this process's children, as devices 0, 1 and so on."""
    os.environ[VARIABLE] = ",".join(gpus)


@contextmanager
def hold_devices(settings: Settings, n_nodes: int) -> Iterator[bool]:
    """Hold this node's GPUs for a cell in the block, where it trains on them.

    Yields whether it uses any.
    """
    gpus = [] if settings.device == "cpu" else visible_gpus()
    cuda = wants_cuda(settings.device, gpus)
    if settings.device != "cpu" and (unknown := unknown_gpu()):
        print(f"{unknown}: as in CUDA it hides what follows; visible: {', '.join(gpus) or 'none'}")
    with reserve(gpus, settings.gpus if cuda and n_nodes == 1 else 0) as mine:
        if mine:
            show_only(mine)
        yield cuda


def threads_of(settings: Settings, workers: int, cpus: int, server_cpus: int) -> int:
    """Return CPU threads of each worker on this node: as configured, or its fraction of the cores.

    It is the same for all strategies of a cell. In a SLURM job with just the requested cores, those of the
    servers are not lent to the workers; on a full machine nothing else needs them.

    Args:
        settings: Settings of the cell.
        workers: Number of workers on this node.
        cpus: Cores that the cell has requested on the node.
        server_cpus: How many of them are for parameter servers.
    """
    cores = len(usable_cores())
    if "SLURM_JOB_ID" in os.environ and cores == cpus:
        cores -= server_cpus
    return settings.threads or max(1, cores // workers)
