"""What tests that train cells by the real launcher share: its path, settings, waiting for its ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

import invariants
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.strategies import REGISTRY, get_option_defaults, get_strategy_class
from stratbench.strategies.needs import iter_missing_requirements
from stratbench.train import forkserver

Found = TypeVar("Found")
WORKFLOW = Path(__file__).parents[1] / "workflow"
#: The folders of the tests whose modules others import.
FOLDERS = [
    Path(__file__).parent,
    *(Path(__file__).parent / name for name in ("core", "whole")),
    *sorted(path for path in Path(__file__).parent.glob("extensions/*") if path.is_dir()),
]
FOREVER = 1_000_000  # epochs
#: The longest that anything is waited for: it takes seconds, but minutes on a very busy machine.
LIMIT_S = 900.0
#: Time limits for a cell that has to get on before it reaches one: a busy machine may need the longest.
LIMITS_S = (10.0, 60.0, 300.0)
#: The rules of the audit that may find something in an honest cell: the machine and its load are to blame.
OF_THE_MACHINE = {"busy-machine", "loaded-machine", "steps-uneven", "workers-are-processes"}
OF_THE_MACHINE |= {"processes-share-cores", "late-start", "input-bound", "waits-for-cores"}
OF_THE_MACHINE |= {"ranks-share-cores"}
#: Of a strategy that takes no SGD.
ADAMW = {
    "optimizer": "adamw", "momentum": 0.0, "nesterov": False, "betas": [0.9, 0.999], "eps": 1e-8,
    "lr": 0.01,
}  # fmt: skip
TINY = {
    "source": "synthetic", "train_samples": 64, "test_samples": 40, "classes": 3, "channels": 1,
    "size": 16, "seed": 0,
}  # fmt: skip


#: The strategies that train in our loop; others are a program of the user's.
IN_OUR_LOOP = [name for name in REGISTRY if get_strategy_class(name).kind != "own"]


def each_strategy(names: Iterable[str] = IN_OUR_LOOP) -> list[Any]:
    """A test's parameters: names of strategies, skipped where what they need is not installed."""
    lacking = {
        name: " ".join(iter_missing_requirements([(name, get_strategy_class(name), {})]))
        for name in names
    }
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=reason))
        for name, reason in lacking.items()
    ]


@dataclass
class LaunchedCell:
    """A launcher at work, and where it leaves what."""

    cell: Cell
    process: subprocess.Popen[str]
    record: Path
    timeline: Path
    logs: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder.from_log_dir(self.logs)

    def finish(self, timeout_s: float = LIMIT_S) -> tuple[int, str]:
        """Exit code, and what was printed (stdout and stderr)."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def finish_with(self, exit_code: int) -> str:
        """What was printed until the end, which must have this exit code."""
        code, output = self.finish()
        assert code == exit_code, output
        return output

    def read_record(self) -> dict[str, Any]:
        return json.loads(self.record.read_text())

    def broken_invariants(self) -> list[str]:
        """The invariants that the record breaks, if there is one."""
        return invariants.broken(self.read_record()) if self.record.exists() else []


def select_installed(*strategies: str) -> list[str]:
    """Those of the strategies that are installed: a core without extensions has fewer."""
    return [name for name in strategies if name in REGISTRY]


def settings(strategy: str = "ddp", **changes: Any) -> Settings:
    """Settings of a short cell on 2 CPU workers; `options` are the strategy's defaults."""
    base = Settings(
        strategy=strategy, options={}, model="vgg-compact", dataset="tiny", gpus=2, seed=7,
        epochs=1, global_batch=16, per_worker_batch=8, lr=0.05, momentum=0.9, weight_decay=0.0,
        nesterov=False, precision="fp32", augment=False, warmup_steps=2, device="cpu", threads=1,
        slowdown=None, data_spec=TINY,
    )  # fmt: skip
    if "options" not in changes:
        changes["options"] = get_option_defaults(strategy)
    cls = get_strategy_class(strategy)
    if cls.policy and cls.Options(**changes["options"]).refusal("sgd"):
        changes = ADAMW | changes
    return replace(base, **changes)


def until(condition: Callable[[], Found], timeout_s: float = LIMIT_S) -> Found:
    """What `condition` returns, once that is true. It is asked soon again at first, then every 0.05 s.

    A condition that takes long, such as a command of SLURM, is asked in a fifth of the time.
    """
    begun_s = time.monotonic()
    deadline, pause_s = begun_s + timeout_s, 0.001
    while not (found := condition()):
        now_s = time.monotonic()
        assert now_s < deadline, "waited in vain"
        time.sleep(max(pause_s, min(4 * (now_s - begun_s), 0.2)))
        pause_s = min(2 * pause_s, 0.05)
        begun_s = time.monotonic()
    return found


def train_one_epoch(launched: LaunchedCell) -> None:
    """Wait until the first epoch is through."""
    assert trains_one_epoch(launched), launched.process.communicate()[0]


def trains_one_epoch(launched: LaunchedCell) -> bool:
    """Wait until the first epoch is through, or the launcher has ended; whether it still trains."""
    progress = launched.folder.epoch_results_path
    until(
        lambda: (
            launched.process.poll() is not None
            or (progress.exists() and progress.read_text().count("\n") >= 1)
        )
    )
    return launched.process.poll() is None


def kill_all(launcher: subprocess.Popen[Any]) -> None:
    """Kill a launcher and all its processes at once, as the loss of a node does."""
    processes = [psutil.Process(launcher.pid)]
    for process in [*processes, *processes[0].children(recursive=True)]:
        process.kill()
    launcher.communicate()


def phase_logs(logs: Path) -> list[Path]:
    """The phase logs of all workers of the cells with log folders below `logs`."""
    return [
        log for path in logs.rglob(RunFolder.NAME) for log in RunFolder(path).list_phase_log_paths()
    ]


def assert_gone(processes: list[psutil.Process], within_s: float = LIMIT_S) -> None:
    """None of `processes` runs any more; a zombie, whose end nobody took note of, has ended."""
    with contextlib.suppress(AssertionError):
        until(lambda: not any(map(_runs, processes)), within_s)
    alive = [p for p in processes if _runs(p)]
    assert not alive, [(p.pid, p.cmdline()) for p in alive]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def sharing(workflow: Path = WORKFLOW) -> Iterator[psutil.Process]:
    """Have launchers share a server, which has its code from `workflow`; yields its process."""
    me = psutil.Process()
    before = me.children()
    with ExitStack() as shared:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(workflow))
            shared.enter_context(forkserver.run_shared_fork_server())
        (server,) = set(me.children()) - set(before)
        yield server
