"""Keeps footprints on disk, and makes the missing ones in parallel."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from importlib.metadata import version
from pathlib import Path

from stratbench.cell.files import read_json, write_atomic
from stratbench.cell.installation import PACKAGE
from stratbench.plan.footprint.footprint import BATCHES, Footprint, make_footprint
from stratbench.plan.footprint.processes import pool_of
from stratbench.plan.footprint.request import Request
from stratbench.telemetry.machine.cores import usable_cores
from stratbench.workload.users_code import ModelError

#: The package's files that decide what a training process allocates and sends.
SOURCES = (
    "cell/settings.py", "workload/**/*.py", "telemetry/collective*.py", "telemetry/memory.py",
    "telemetry/shards.py", "strategies/**/*.py", "ps/flat.py", "ps/wire/shm.py", "plan/check.py",
    "plan/footprint/*.py",
)  # fmt: skip


def footprints_of(requests: Iterable[Request], folder: Path) -> dict[Request, Footprint | str]:
    """The footprint of each request; where it could not be made, the reason in one line.

    Footprints in `folder` are read. The others are made, with up to one process for each core, and
    written there.
    """
    found: dict[Request, Footprint | str] = {}
    missing = []
    for request in dict.fromkeys(requests):
        kept = _read(folder / f"{key_of(request)}.json")
        if kept is None:
            missing.append(request)
        else:
            found[request] = kept
    for request, made in _make(missing):
        found[request] = made
        if isinstance(made, Footprint):
            entry = {"of": key_parts(request), "footprint": made.as_dict()}
            write_atomic(folder / f"{key_of(request)}.json", json.dumps(entry) + "\n")
    return found


def key_parts(request: Request) -> dict[str, object]:
    """Everything that a footprint depends on."""
    return {
        "request": request.as_dict(),
        "batches": BATCHES,
        "torch": version("torch"),
        "torchvision": version("torchvision"),
        "source_sha256": source_sha256(),
    }


def key_of(request: Request) -> str:
    """The name of the file that holds a footprint: a hash of `key_parts`."""
    text = json.dumps(key_parts(request), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def source_sha256() -> str:
    """Hash of SOURCES."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Footprint | None:
    try:
        return Footprint.from_dict(read_json(path)["footprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or one that was cut off or edited: it will be made again


def _make(requests: list[Request]) -> Iterator[tuple[Request, Footprint | str]]:
    if not requests:
        return
    # The slowest first (many modules, sharded), so that none is left running alone at the end.
    requests = sorted(
        requests, key=lambda r: (r.traits.shards_states, r.settings.model), reverse=True
    )
    with pool_of(min(len(usable_cores()), len(requests))) as pool:
        running = {pool.submit(try_footprint, request): request for request in requests}
        print(
            f"predicting {len(running)} kinds of cells; they are kept for the next time", flush=True
        )
        for i, done in enumerate(as_completed(running), 1):
            if i % 10 == 0 or i == len(running):
                print(f"  {i} of {len(running)}", flush=True)
            yield running[done], _result(done)


def _result(done: Future[Footprint | str]) -> Footprint | str:
    try:
        return done.result()
    except BrokenProcessPool:
        return "the process that predicts it was killed (out of memory?)"


def try_footprint(request: Request) -> Footprint | str:
    """The footprint, or the error in one line: one model that fails must not stop the whole plan."""
    import torch

    from stratbench.workload.network.trial import NO_VALUES

    torch.set_num_threads(1)
    try:
        return make_footprint(request)
    except ModelError as error:  # says by itself what is wrong
        return str(error)
    except NO_VALUES:
        return "its forward asks for the values of tensors, and a prediction has none"
    except Exception as error:  # whatever a model or strategy raises
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
