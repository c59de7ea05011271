"""Reservation of GPUs for a cell by file locks, so that no two cells share a GPU."""

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
from stratbench.telemetry.machine.cores import list_usable_cores
from stratbench.train.locks import create_private_folder

if TYPE_CHECKING:
    from stratbench.cell.settings import Settings


#: Pattern of the driver's device files. Each GPU has one.
DEVICE_FILES = "/dev/nvidia[0-9]*"
VARIABLE = "CUDA_VISIBLE_DEVICES"
#: Name of a GPU in CUDA_VISIBLE_DEVICES: a number, or the beginning of a UUID.
_NAME = re.compile(r"\d+|(GPU|MIG)-.+")


class DeviceError(RuntimeError):
    """The machine lacks a device that a cell needs; the message says what to change."""


def list_visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES.

    As in CUDA, a name that is not a GPU's hides all names after it.

    Raises:
        DeviceError: If one GPU is named twice, for which CUDA would show none.
    """
    library, visible = nvml.Nvml(), os.environ.get(VARIABLE)
    if visible is None:
        return [str(gpu.index) for gpu in library.gpus()]
    names: dict[str, str] = {}
    for name in _split_gpu_names(visible):
        identity = _find_gpu_uuid(name, library)
        if identity is None:
            break
        if identity in names:
            raise DeviceError(
                f"{VARIABLE} = {visible!r} names one GPU twice ({names[identity]} and {name}), for which "
                "CUDA shows none at all; name each GPU once"
            )
        names[identity] = name
    return list(names.values())


def unknown_gpu_reason() -> str | None:
    """Return a sentence on the first name in CUDA_VISIBLE_DEVICES that is not a GPU's.

    The result is None if there is no such name.
    """
    library, names = nvml.Nvml(), os.environ.get(VARIABLE, "")
    for name in _split_gpu_names(names):
        if _find_gpu_uuid(name, library) is None:
            return f"{name!r} in {VARIABLE} = {names!r} is no GPU of this machine"
    return None


def _split_gpu_names(visible: str) -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES before the first -1 or empty name.

    Such a name hides the rest.
    """
    names = [name.strip() for name in visible.split(",")]
    ends = [i for i, name in enumerate(names) if name in ("", "-1")]
    return names[: ends[0]] if ends else names


def _find_gpu_uuid(name: str, library: nvml.Nvml) -> str | None:
    """Return the UUID of a GPU from its number or any other name.

    The result is None if the name is not a GPU's. If NVML does not answer or does not know the name, return
    the name itself.
    """
    if not _NAME.fullmatch(name):
        return None
    if name.isdecimal():
        name = str(int(name))
    # CUDA still knows MIG instances by older names, which begin with their GPU's.
    if library.reason or name.startswith("MIG-GPU-"):
        return name
    return library.find_uuid(name)


def wants_cuda(device: str, gpus: list[str]) -> bool:
    """Return whether a cell with this `device` setting (auto, cpu, cuda) trains on GPUs.

    Raises:
        DeviceError: If it requires GPUs and none can be used, or if a GPU seems to be here but cannot be
            used.
    """
    if device == "cpu" or gpus:
        return device != "cpu"
    problem = unusable_gpu_reason()
    if device == "cuda" and not problem:
        reason, visible = nvml.Nvml().reason, os.environ.get(VARIABLE)
        problem = "no GPU is visible here"
        if visible is not None:
            problem += f" ({unknown_gpu_reason() or f'{VARIABLE} = {visible!r}'})"
        elif reason:
            problem += f" and NVML does not answer ({reason})"
    if problem:
        raise DeviceError(
            f"device = {device!r}, but {problem}; see to {VARIABLE}, the driver, its NVML library and "
            "nvidia-ml-py, or say device: cpu to train on the CPU"
        )
    return False


def unusable_gpu_reason() -> str | None:
    """Return why a visible GPU cannot be used, or None if none is visible."""
    if VARIABLE in os.environ:
        named = _split_gpu_names(os.environ[VARIABLE])[:1]
        return unknown_gpu_reason() if named and _NAME.fullmatch(named[0]) else None
    files, reason = sorted(glob(DEVICE_FILES)), nvml.Nvml().reason
    if not files or reason is None:
        return None
    return f"{files[0]} is there and NVML does not answer ({reason})"


@contextmanager
def reserve_gpus(gpus: list[str], wanted: int) -> Iterator[list[str]]:
    """Lock some GPUs until the context ends, and yield their names. Wait while other cells use GPUs.

    The locks are in the user's own folder on this node, and end with the process. So a killed cell leaves no
    lock, and no other user can take one.

    Args:
        gpus: Names of the visible GPUs.
        wanted: Number of GPUs to lock.

    Raises:
        DeviceError: If fewer GPUs are visible than wanted.
    """
    if wanted > len(gpus):
        seen = "; ".join(filter(None, [", ".join(gpus) or "none", unknown_gpu_reason()]))
        raise DeviceError(
            f"the cell needs {wanted} GPUs on this node, but {len(gpus)} are visible ({seen}); "
            "lower `gpus` in the experiment, use device: cpu, or raise cluster.gpus_per_node to what a "
            "node has"
        )
    if not wanted:
        yield []
        return
    folder = create_private_folder()
    locks = {gpu: folder / f"gpu-{name}" for gpu, name in list_lock_file_names(gpus).items()}
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
                # The GPUs that were locked are released: two cells with half of the GPUs each would wait
                # forever.
                held.close()
                mine.clear()
                if not announced:
                    print(f"waiting for {wanted} free GPUs (another cell holds some)", flush=True)
                    announced = True
                time.sleep(0.5)
        yield mine


def list_lock_file_names(gpus: list[str]) -> dict[str, str]:
    """Return the name of the lock file for each GPU.

    The name is the GPU's full UUID if NVML knows it. Numbers would not do, because a scheduler may show every
    job its own GPU as number 0.
    """
    library = nvml.Nvml()
    return {gpu: (_find_gpu_uuid(gpu, library) or gpu).replace("/", "_") for gpu in gpus}


def set_visible_gpus(gpus: list[str]) -> None:
    """Make only `gpus` visible to this process's children, as devices 0, 1 and so on."""
    os.environ[VARIABLE] = ",".join(gpus)


@contextmanager
def reserve_cell_gpus(settings: Settings, n_nodes: int) -> Iterator[bool]:
    """Reserve this node's GPUs for a cell within the context.

    The context yields whether the cell trains on GPUs.
    """
    gpus = [] if settings.device == "cpu" else list_visible_gpus()
    cuda = wants_cuda(settings.device, gpus)
    if settings.device != "cpu" and (unknown := unknown_gpu_reason()):
        print(f"{unknown}: as in CUDA it hides what follows; visible: {', '.join(gpus) or 'none'}")
    with reserve_gpus(gpus, settings.gpus if cuda and n_nodes == 1 else 0) as mine:
        if mine:
            set_visible_gpus(mine)
        yield cuda


def count_threads_per_worker(settings: Settings, workers: int, cpus: int, server_cpus: int) -> int:
    """Return the number of CPU threads per worker on this node.

    The number is as configured, or the worker's share of the cores. If a SLURM job has exactly the requested
    cores, the servers' cores are not counted. So all strategies of a comparison have the same number of
    threads.

    Args:
        settings: Settings of the cell.
        workers: Number of workers on this node.
        cpus: Number of cores that the cell has requested on the node.
        server_cpus: Number of these cores that are for parameter servers.
    """
    cores = len(list_usable_cores())
    if "SLURM_JOB_ID" in os.environ and cores == cpus:
        cores -= server_cpus
    return settings.threads or max(1, cores // workers)
