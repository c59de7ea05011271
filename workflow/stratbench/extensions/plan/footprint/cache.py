"""Caches results of checks and dry runs on disk, and computes missing results in processes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from stratbench.cell.extensions import load_extensions
from stratbench.cell.files import read_json, write_text_atomically
from stratbench.cell.installation import PACKAGE
from stratbench.cell.text.words import format_seconds
from stratbench.extensions.plan.footprint.processes import make_process_pool
from stratbench.telemetry.machine.cores import list_usable_cores

#: Files of the package that determine what a training process allocates and sends.
SOURCES = (
    "cell/settings.py", "workload/**/*.py", "telemetry/collective*.py", "telemetry/memory.py",
    "telemetry/flops.py", "telemetry/shards.py", "strategies/**/*.py",
    "extensions/plan/check.py", "extensions/plan/footprint/*.py",
    *(f"extensions/{name}/**/*.py" for name, each in load_extensions().items() if each.strategies),
)  # fmt: skip
#: Fault in the result of a job whose process ended without returning one.
KILLED = "its process was killed (out of memory?)"


class CachedResult(Protocol):
    """Protocol of a result that a process returns. It is not cached if it has a `fault`."""

    @property
    def fault(self) -> str | None: ...

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self: ...

    @classmethod
    def failed(cls, reason: str) -> Self: ...


class CachedJob(NamedTuple):
    """A call to run in a process, whose result is cached.

    Attributes:
        name: Name in progress messages.
        arguments: Arguments of the work.
        asked: Everything else that determines the result, as JSON-able values.
        weight: Approximate relative duration.
    """

    name: str
    arguments: tuple[Any, ...]
    asked: Any
    weight: float = 1.0


Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept", bound=CachedResult)


def compute_cached_results(
    progress_text: str,
    result_class: type[Kept],
    compute_result: Callable[..., Kept],
    jobs: Mapping[Key, CachedJob],
    folder: Path,
    preloaded_modules: Sequence[str] = (),
) -> dict[Key, Kept]:
    """Return the result of each job, from the cache or computed in a process.

    The results have the order of `jobs`. Missing results are announced with their expected time.

    Args:
        progress_text: Text on the work, with `{}` for the number of jobs.
        result_class: Class of the results.
        compute_result: Computes the result of a job from its arguments.
        jobs: The jobs.
        folder: Folder of the cache.
        preloaded_modules: Modules that the processes share, if these are the first processes.
    """
    paths = {key: folder / f"{make_cache_key(job.asked)}.json" for key, job in jobs.items()}
    results = {
        key: cached
        for key, path in paths.items()
        if (cached := _read_cached_result(path, result_class))
    }
    # The longest jobs start first, so that no long job runs alone at the end.
    missing = sorted(jobs.keys() - results.keys(), key=lambda key: (-jobs[key].weight, paths[key]))
    if not missing:
        return results
    print(progress_text.format(len(missing)), flush=True)
    begun, done, whole = time.monotonic(), 0.0, sum(jobs[key].weight for key in missing)
    with make_process_pool(min(len(list_usable_cores()), len(missing)), preloaded_modules) as pool:
        running = {pool.submit(compute_result, *jobs[key].arguments): key for key in missing}
        for i, future in enumerate(as_completed(running), 1):
            key = running[future]
            job = jobs[key]
            try:
                result = results[key] = future.result()
            except BrokenProcessPool:
                result = results[key] = result_class.failed(KILLED)
            if result.fault is None:
                entry = {"of": collect_cache_key_values(job.asked), "result": asdict(result)}
                write_text_atomically(paths[key], json.dumps(entry) + "\n")
            done += job.weight
            if i % -(-len(missing) // 10) == 0 or i == len(missing):
                left_s = (time.monotonic() - begun) * (whole / done - 1)
                left = f", about {format_seconds(left_s)} left" if i < len(missing) else ""
                print(f"  {job.name}: {i} of {len(missing)}{left}", flush=True)
    return {key: results[key] for key in jobs}


def collect_cache_key_values(request: Any) -> dict[str, Any]:
    """Return all values on which a cached result depends."""
    return {
        "asked": request,
        "torch": read_package_version("torch"),
        "torchvision": read_package_version("torchvision"),
        "source_sha256": hash_source_files(),
    }


def make_cache_key(request: Any) -> str:
    """Return the name of a result's file in the cache, which is a hash.

    The hash is of all values on which the result depends.
    """
    text = json.dumps(collect_cache_key_values(request), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def read_package_version(package: str) -> str:
    """Return the installed version of a package, whose metadata are parsed once."""
    return version(package)


@cache
def hash_source_files() -> str:
    """Return a hash of the source files on which results depend."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_cached_result(path: Path, result_class: type[Kept]) -> Kept | None:
    try:
        return result_class.from_dict(read_json(path)["result"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # without a readable file the result is computed again
