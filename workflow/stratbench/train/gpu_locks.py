"""Reserves GPUs by file locks, so that no two cells share a GPU."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from glob import glob
from typing import TYPE_CHECKING

from stratbench.cell.locks import try_to_lock_file
from stratbench.telemetry.machine import nvml
from stratbench.telemetry.machine.cores import list_usable_cores
from stratbench.train.locks import create_private_folder

if TYPE_CHECKING:
    from stratbench.cell.settings import Settings


#: Pattern of the paths of NVIDIA's device files. The driver creates one per GPU.
DEVICE_FILES = "/dev/nvidia[0-9]*"
VARIABLE = "CUDA_VISIBLE_DEVICES"
#: Pattern of a GPU's name in CUDA_VISIBLE_DEVICES: a number, or the beginning of a UUID.
_NAME = re.compile(r"\d+|(GPU|MIG)-.+")


class DeviceError(RuntimeError):
    """Raised if a cell needs a device that cannot be used. The message says what to change."""


def list_visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES.

    As in CUDA, a name that belongs to no GPU hides all names after it.

    Raises:
        DeviceError: If one GPU is named twice, for which CUDA would show none.
    """
    library, visible = nvml.Nvml(), os.environ.get(VARIABLE)
    if visible is None:
        return [str(gpu.index) for gpu in library.list_gpus()]
    names: dict[str, str] = {}
    for name in _split_gpu_names(visible):
        identity = _find_gpu_uuid(name, library)
        if identity is None:
            break
        if identity in names:
            raise DeviceError(
                f"{VARIABLE} = {visible!r} names one GPU twice ({names[identity]} and {name}); "
                "CUDA would then show no GPU at all; name each GPU once"
            )
        names[identity] = name
    return list(names.values())


def describe_unknown_visible_gpu() -> str | None:
    """Return a clause about the first name in CUDA_VISIBLE_DEVICES that belongs to no GPU.

    The result is None if there is no such name.
    """
    library, names = nvml.Nvml(), os.environ.get(VARIABLE, "")
    for name in _split_gpu_names(names):
        if _find_gpu_uuid(name, library) is None:
            return f"{name!r} in {VARIABLE} = {names!r} is no GPU of this machine"
    return None


def _split_gpu_names(visible: str) -> list[str]:
    """Return the names in a value of CUDA_VISIBLE_DEVICES before the first -1 or empty name.

    A -1 or an empty name hides all names after it.
    """
    names = [name.strip() for name in visible.split(",")]
    ends = [i for i, name in enumerate(names) if name in ("", "-1")]
    return names[: ends[0]] if ends else names


def _find_gpu_uuid(name: str, library: nvml.Nvml) -> str | None:
    """Return the UUID of the GPU with a name as in CUDA_VISIBLE_DEVICES. None if it is no GPU's.

    The result is the name itself if NVML does not work, or for the older names of MIG instances.
    """
    if not _NAME.fullmatch(name):
        return None
    if name.isdecimal():
        name = str(int(name))
    # CUDA still accepts older names of MIG instances, which begin with the name of their GPU. NVML does not.
    if library.reason or name.startswith("MIG-GPU-"):
        return name
    return library.find_gpu_uuid(name)


def wants_cuda(device: str, visible_gpus: list[str]) -> bool:
    """Return whether a cell with this `device` setting (auto, cpu, cuda) trains on GPUs.

    Raises:
        DeviceError: If the setting is cuda and no GPU can be used, or if there seems to be a GPU that cannot
            be used.
    """
    if device == "cpu" or visible_gpus:
        return device != "cpu"
    problem = unusable_gpu_reason()
    if device == "cuda" and not problem:
        reason, visible = nvml.Nvml().reason, os.environ.get(VARIABLE)
        problem = "no GPU is visible here"
        if visible is not None:
            problem += f" ({describe_unknown_visible_gpu() or f'{VARIABLE} = {visible!r}'})"
        elif reason:
            problem += f" and NVML does not answer ({reason})"
    if problem:
        raise DeviceError(
            f"device = {device!r}, but {problem}; check {VARIABLE}, the GPU driver, its NVML library "
            "and the package nvidia-ml-py, or set device: cpu to train on the CPU"
        )
    return False


def unusable_gpu_reason() -> str | None:
    """Return why a GPU of this machine cannot be used. None if there is no GPU."""
    if VARIABLE in os.environ:
        named = _split_gpu_names(os.environ[VARIABLE])[:1]
        return describe_unknown_visible_gpu() if named and _NAME.fullmatch(named[0]) else None
    files, reason = sorted(glob(DEVICE_FILES)), nvml.Nvml().reason
    if not files or reason is None:
        return None
    return f"{files[0]} is there and NVML does not answer ({reason})"


@contextmanager
def reserve_gpus(visible_gpus: list[str], gpu_count: int) -> Iterator[list[str]]:
    """Lock free GPUs until the context ends, and yield their names. Wait until enough are free.

    The locks are in the user's own folder on this node, and end with the process. So a killed cell leaves no
    lock, and no other user can take a lock.

    Args:
        visible_gpus: Names of the visible GPUs.
        gpu_count: Number of GPUs to lock.

    Raises:
        DeviceError: If fewer GPUs are visible than `gpu_count`.
    """
    if gpu_count > len(visible_gpus):
        visible_names = "; ".join(
            filter(None, [", ".join(visible_gpus) or "none", describe_unknown_visible_gpu()])
        )
        raise DeviceError(
            f"the cell needs {gpu_count} GPUs on this node, but {len(visible_gpus)} are visible "
            f"({visible_names}); lower `gpus` in the experiment, set device: cpu, or raise "
            "cluster.gpus_per_node to the number of GPUs of a node"
        )
    if not gpu_count:
        yield []
        return
    folder = create_private_folder()
    locks = {
        gpu: folder / f"gpu-{name}" for gpu, name in get_lock_names_by_gpu(visible_gpus).items()
    }
    with ExitStack() as held:
        mine: list[str] = []
        announced = False
        while len(mine) < gpu_count:
            for gpu in visible_gpus:
                if gpu in mine or len(mine) == gpu_count:
                    continue
                if (descriptor := try_to_lock_file(locks[gpu])) is not None:
                    held.callback(os.close, descriptor)
                    mine.append(gpu)
            if len(mine) < gpu_count:
                # All locks are released before the next try. Otherwise two cells that each hold half of the
                # GPUs would wait forever.
                held.close()
                mine.clear()
                if not announced:
                    print(
                        f"waiting for {gpu_count} free GPUs (another cell holds some)", flush=True
                    )
                    announced = True
                time.sleep(0.5)
        yield mine


def get_lock_names_by_gpu(gpus: list[str]) -> dict[str, str]:
    """Return the name of each GPU's lock file as a dict by GPU.

    The name is the GPU's full UUID if NVML knows it. A number would not identify the GPU, because a scheduler
    may show every job its own GPU as number 0.
    """
    library = nvml.Nvml()
    return {gpu: (_find_gpu_uuid(gpu, library) or gpu).replace("/", "_") for gpu in gpus}


def set_visible_gpus(gpus: list[str]) -> None:
    """Make only these GPUs visible to this process's children, as devices 0, 1, ..."""
    os.environ[VARIABLE] = ",".join(gpus)


@contextmanager
def reserve_cell_gpus(settings: Settings, n_nodes: int) -> Iterator[bool]:
    """Reserve the GPUs that a cell needs on this node, until the context ends.

    The context yields whether the cell trains on GPUs.
    """
    gpus = [] if settings.device == "cpu" else list_visible_gpus()
    cuda = wants_cuda(settings.device, gpus)
    if settings.device != "cpu" and (unknown := describe_unknown_visible_gpu()):
        print(f"{unknown}: as in CUDA it hides what follows; visible: {', '.join(gpus) or 'none'}")
    with reserve_gpus(gpus, settings.gpus if cuda and n_nodes == 1 else 0) as mine:
        if mine:
            set_visible_gpus(mine)
        yield cuda


def count_threads_per_worker(settings: Settings, workers: int, cpus: int, server_cpus: int) -> int:
    """Return the number of CPU threads per worker on this node.

    The number is the setting `threads`, or else the worker's share of the cores. If a SLURM job has exactly
    the requested cores, the cores for parameter servers do not count. So all strategies of a comparison have
    the same number of threads.

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
