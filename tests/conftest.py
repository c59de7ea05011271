"""Shared by the tests: how they run side by side, a tiny data set, cells trained by the real launcher."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Tests run side by side; PyTorch, not yet imported, would give each of them all the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch 2.13 multiplies no bf16 matrices on some virtual machines with AMX: "could not create a primitive".
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# It looks for the source of what it registers, which takes longer the more is imported before it.
if "PYTEST_XDIST_WORKER" in os.environ:
    import stratbench.workload.with_torch  # noqa: F401
    from stratbench.workload.network.models import import_torchvision

    import_torchvision()

import hypothesis
import pytest

from launching import FOLDERS, TINY, WORKFLOW, LaunchedCell, sharing
from process_server import start_with_imports
from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.telemetry.machine.cores import list_usable_cores
from stratbench.train import forkserver
from stratbench.workload.data.prepare import prepare_data_set

# Tests of extensions import what others of them and of the core need to set up.
sys.path += [str(path) for path in FOLDERS if str(path) not in sys.path]
#: What runs on PyTorch's CUDA build alone; `make test-gpu-path` names the folder, and so collects it.
collect_ignore = ["software_gpu"]
#: A test may take so many times as long as its mark says: that is for a machine that does nothing else.
BUSY = 4
#: Where the process that hands out the tests keeps the folder of the fork server that `warm` names.
WARM = pytest.StashKey[str]()

# What nohup or a shell's `&` has this process ignore, the processes of the tests would ignore, too.
for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(signum) == signal.SIG_IGN:
        interrupts = signum == signal.SIGINT
        signal.signal(signum, signal.default_int_handler if interrupts else signal.SIG_DFL)
# However long an example takes on a busy machine, `timeout` judges.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")
start_with_imports()
# torch.compile would compile and load a program for each kind of vector instructions, to see which work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Hundreds of processes import the package, and several all tests: each is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two to a core and one: much of what slow tests do is waiting, most of all for SLURM.

    Quick tests compute, and each process imports PyTorch first.
    """
    cores = len(list_usable_cores())
    return cores if "not slow" in config.option.markexpr else 2 * cores + 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Processes that run tests side by side share a fork server, which imports PyTorch when one asks."""
    config = node.config
    if WARM not in config.stash:
        shared = ExitStack()
        config.add_cleanup(shared.close)
        shared.enter_context(sharing())
        config.stash[WARM] = os.environ.pop(forkserver.FOLDER_VARIABLE)
    node.workerinput["warm"] = config.stash[WARM]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting the tests imports stays: nothing looks for garbage in it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test the time of a busy machine, and order them.

    Side by side, files that wait (for SLURM) and files that compute start in turn.
    Of each kind, what may take longest starts first, so that all cores have work until the end. Files
    with a test that is to run alone come last: while it waits for all others, its process does nothing.
    """
    for item in items:
        if timeout := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BUSY * timeout.args[0]), append=False)
    if not hasattr(config, "workerinput"):
        return
    limit_s: dict[Path, float] = {}
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    for item in items:
        timeout = item.get_closest_marker("timeout")
        limit_s[item.path] = max(timeout.args[0] if timeout else 0, limit_s.get(item.path, 0))
    alone = {item.path for item in items if item.get_closest_marker("alone")}
    longest_first = sorted(limit_s, key=lambda path: (-limit_s[path], -slow[path]))
    wait = {item.path for item in items if item.get_closest_marker("slurm")}
    waiting, computing = ([p for p in longest_first if (p in wait) == w] for w in (True, False))
    place = {path: 2 * n for n, path in enumerate(waiting)}
    place |= {path: 2 * n + 1 for n, path in enumerate(computing)}
    items.sort(key=lambda item: (item.path in alone, place[item.path]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """No other test runs beside one that is to run alone; waiting for that is not its time."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:  # a process forked in the test holds the file open, too
            fcntl.flock(lock, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 training and 40 test images of 16x16 pixels in 3 classes, prepared."""
    folder = tmp_path_factory.mktemp("data") / "tiny"
    prepare_data_set("tiny", folder, spec=TINY)
    return folder


@pytest.fixture(scope="session")
def warm(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """An environment in which launchers share a fork server: where its own is not what is tested.

    It has imported PyTorch: no time limit of a cell runs meanwhile.
    """
    folder = getattr(request.config, "workerinput", {}).get("warm")
    with ExitStack() as own:
        if folder is None:
            own.enter_context(sharing())
            folder = os.environ.pop(forkserver.FOLDER_VARIABLE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(WORKFLOW))
            patch.setenv(forkserver.FOLDER_VARIABLE, folder)
            assert forkserver._find_shared_server_address() is not None
            found = dict(os.environ)
        yield found


@pytest.fixture
def start_cell(tmp_path: Path, tiny_data: Path) -> Iterator[Callable[..., LaunchedCell]]:
    """A function that starts a cell's launcher; what still runs at the end of the test is killed.

    Then the record of each cell keeps all invariants.
    """
    started: list[LaunchedCell] = []

    def start(
        s: Settings,
        *,
        cell: Cell | None = None,
        time_limit_s: float = 0,
        workflow: Path = WORKFLOW,
        data_dir: Path = tiny_data,
        parent: int | None = None,
        program: tuple[str, str] = ("-m", "stratbench.train.launch"),
        **popen: Any,
    ) -> LaunchedCell:
        cell = cell or Cell("tests", "tiny", s.strategy, s.model, s.dataset, s.gpus, 0)
        record, logs = cell.record_path(tmp_path), cell.log_dir(tmp_path)
        timeline = record.with_name("timeline.csv")
        command = [
            sys.executable, *program, "--cell", json.dumps(asdict(cell)),
            "--settings", s.as_json(), "--data", str(data_dir), "--record", str(record),
            "--timeline", str(timeline), "--logs", str(logs), "--time-limit-s", str(time_limit_s),
            *(["--parent", str(parent)] if parent else []),
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=popen.pop("env", os.environ) | {"PYTHONPATH": str(workflow)},
            **popen,
        )
        started.append(LaunchedCell(cell, process, record, timeline, logs))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()
    broken = [sentence for launched in started for sentence in launched.broken_invariants()]
    assert not broken, "\n".join(broken)
