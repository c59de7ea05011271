"""What the stages share: a list of checks, kept on disk, and processes with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import invariants
from stratbench.cell.files import write_text_atomically


class ChildFailed(RuntimeError):
    """A child process raised, died or took too long; the message says which."""


@dataclass
class Stage:
    """One stage at work: what it runs on, and what it has found so far.

    `device` is `cuda` or `cpu`. `small`: only what a quick test needs. Everything found is written to
    `out` at once, so that a stage that is killed leaves what it had.
    """

    name: str
    device: str
    small: bool
    out: Path
    scratch: Path
    deadline_s: float  # of time.monotonic()

    def __post_init__(self) -> None:
        self.found: dict[str, Any] = {"checks": [], "skipped": [], "figures": {}}

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the stage is killed."""
        return self.deadline_s - time.monotonic()

    def check(self, what: str, holds: bool, said: str = "") -> None:
        """Note whether `what` holds, with its figures in words."""
        self.found["checks"].append({"what": what, "holds": bool(holds), "said": said})
        print(f"{'ok  ' if holds else 'FAIL'} {what}: {said}", flush=True)
        self._save()

    def check_invariants(self, what: str, record: dict[str, Any]) -> None:
        """Note whether the figures of a record agree."""
        broken = invariants.broken(record)
        self.check(f"{what}: the record keeps all invariants", not broken, "; ".join(broken))

    def skip(self, what: str, why: str) -> None:
        """Note that `what` was not looked at."""
        self.found["skipped"].append({"what": what, "why": why})
        self._save()

    def needs_gpu(self, *names: str) -> bool:
        """Whether there is a GPU; without one, `names` are noted as not looked at."""
        if not self.on_cuda:
            for what in names:
                self.skip(what, "no GPU")
        return self.on_cuda

    def figures(self, **figures: Any) -> None:
        self.found["figures"] |= figures
        self._save()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An exception inside fails `what`, and the stage goes on."""
        try:
            yield
        except Exception as e:
            traceback.print_exc()
            lines = str(e).strip().splitlines() or [""]
            self.check(what, False, f"{type(e).__name__}: {lines[0]}"[:300])

    def folder(self, name: str) -> Path:
        """A new, empty folder of the stage's own."""
        path = self.scratch / self.name / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def _save(self) -> None:
        write_text_atomically(self.out, json.dumps(self.found, default=str))


class Child:
    """`function(*args)` in a forked process. Fork before this process computes or touches a GPU."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(sender, function, args))
        self._process.start()
        sender.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def result(self, timeout_s: float) -> Any:
        """What the function returned; ChildFailed with what it raised. The process has ended then."""
        try:
            if not self._receiver.poll(max(timeout_s, 0)):
                raise ChildFailed(f"no end after {timeout_s:.0f} s")
            kind, value = self._receiver.recv()
        except EOFError:
            self._process.join(5)
            raise ChildFailed(f"died with exit code {self._process.exitcode}") from None
        finally:
            end_tree(self.pid)
        if kind == "error":
            raise ChildFailed(value)
        return value

    def exit_code(self, timeout_s: float) -> int | None:
        """Of a process that ends itself; None where it had to be killed."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        end_tree(self.pid)
        return code


def _run(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = ("ok", function(*args))
    except BaseException as e:
        traceback.print_exc()
        answer = ("error", f"{type(e).__name__}: {e}"[:2000])
    sender.send(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as a worker ends: no orderly shutdown of NCCL, which could wait


def in_child(stage: Stage, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in a process of its own, within what is left of the stage."""
    return Child(function, *args).result(stage.left_s - 1)


def end_tree(pid: int) -> None:
    """Kill process `pid` and all that it has started; wait until they are gone."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=5)


def median(values: list[float]) -> float:
    """The middle value; the mean of the two middle ones of an even number."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
