"""GPUs are held under locks: never by two cells at once, given back whatever ends the holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_nvml import INSTANCES, UUIDS, FakeNvml

from launching import settings
from stratbench.cell.run_folder import RunFolder
from stratbench.telemetry.machine import nvml
from stratbench.train import agent, gpu_locks
from stratbench.train.gpu_locks import reserve_cell_gpus

pytestmark = pytest.mark.timeout(300)

HOLDER = """
import sys, time
from stratbench.train import gpu_locks
with gpu_locks.reserve_gpus(sys.argv[2:], int(sys.argv[1])) as mine:
    print("holds", *mine, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def hold(wanted: int, *gpus: str) -> subprocess.Popen[str]:
    """Another process that takes GPUs and keeps them until it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(wanted), *gpus],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(gpu_locks.__file__).parents[2])},
    )


def test_two_cells_get_different_gpus():
    with (
        gpu_locks.reserve_gpus(["a", "b", "c"], 1) as one,
        gpu_locks.reserve_gpus(["a", "b", "c"], 2) as two,
    ):
        assert (one, two) == (["a"], ["b", "c"])
    with gpu_locks.reserve_gpus(["a", "b", "c"], 3) as again:
        assert again == ["a", "b", "c"]


def test_another_process_is_waited_for(capsys):
    other = hold(1, "a", "b")
    assert other.stdout.readline() == "holds a\n"
    with gpu_locks.reserve_gpus(["a", "b"], 1) as mine:  # one is free
        assert mine == ["b"]
    assert capsys.readouterr().err == ""
    waiting = hold(2, "a", "b")
    assert waiting.stdout.readline().startswith("waiting for 2 free GPUs")
    with gpu_locks.reserve_gpus(["a", "b"], 1) as mine:  # the waiting one holds nothing meanwhile
        assert mine == ["b"]
    other.communicate("\n")
    assert waiting.stdout.readline() == "holds a b\n"
    waiting.communicate("\n")


def test_a_killed_holder_gives_its_gpus_back():
    other = hold(1, "a")
    assert other.stdout.readline() == "holds a\n"
    other.kill()
    other.wait()
    with gpu_locks.reserve_gpus(["a"], 1) as mine:
        assert mine == ["a"]


def test_too_few_gpus():
    with (
        pytest.raises(gpu_locks.DeviceError, match="needs 3 GPUs on this node, but 2 are visible"),
        gpu_locks.reserve_gpus(["a", "b"], 3),
    ):
        pass


def test_names_with_a_slash():
    """MIG instances had such names."""
    with gpu_locks.reserve_gpus(["MIG-GPU-1/2/0"], 1) as mine:
        assert mine == ["MIG-GPU-1/2/0"]


@pytest.fixture
def machine(monkeypatch):
    """A function that gives this machine GPUs, and CUDA_VISIBLE_DEVICES a value (None: unset)."""
    real = nvml.Nvml

    def give(variable: str | None = None, gpus: int = 2, **faults) -> None:
        monkeypatch.setattr(nvml, "Nvml", lambda: real(FakeNvml(gpus=gpus, **faults)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if variable is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)

    return give


NO_NVML = {"failures": {"nvmlInit": OSError("driver/library version mismatch")}}


def test_whatever_a_gpu_is_called_its_lock_is_one(machine):
    machine()
    assert gpu_locks.get_lock_names_by_gpu(["0", "1", UUIDS[0], "GPU-666", "7"]) == {
        "0": UUIDS[0], "1": UUIDS[1], UUIDS[0]: UUIDS[0], "GPU-666": UUIDS[1], "7": "7"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["0", "1"]),
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("1, 0", ["1", "0"]),
        ("1,", ["1"]),
        ("0,-1,1", ["0"]),
        ("0,,1", ["0"]),
        ("NoDevFiles", []),
        ("1,9,0", ["1"]),
        ("1,gpu,0", ["1"]),
        (f"{UUIDS[1]},{UUIDS[0]}", [UUIDS[1], UUIDS[0]]),
        (f"GPU-666,{UUIDS[0]}", ["GPU-666", UUIDS[0]]),
        ("GPU-1,GPU-2,GPU-6", ["GPU-1"]),
        ("MIG-GPU-1/2/0", ["MIG-GPU-1/2/0"]),
        (f"{INSTANCES[1]},MIG-aaaaaaaa", []),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(machine, given, expected):
    machine(given)
    assert gpu_locks.list_visible_gpus() == expected


def test_instances_are_visible_by_their_names(machine):
    machine(f"{INSTANCES[1]},MIG-aaaaaaaa", mig=True)
    assert gpu_locks.list_visible_gpus() == [INSTANCES[1], "MIG-aaaaaaaa"]


def test_names_are_believed_where_nvml_cannot_be_asked(machine):
    machine("3,GPU-1,cuda", **NO_NVML)
    assert gpu_locks.list_visible_gpus() == ["3", "GPU-1"]


@pytest.mark.parametrize("given", ["1,1", "0,1,01", f"1,{UUIDS[1]}", "GPU-6,GPU-666"])
def test_a_gpu_that_is_named_twice_is_an_error_and_not_waited_for(machine, given):
    machine(given)
    with pytest.raises(gpu_locks.DeviceError, match=r"names one GPU twice \(.*name each GPU once"):
        gpu_locks.list_visible_gpus()
    machine("1,1", **NO_NVML)
    with pytest.raises(gpu_locks.DeviceError, match="twice"):
        gpu_locks.list_visible_gpus()


def test_a_name_that_is_no_gpu_is_told(machine):
    machine("0,9,1")
    with (
        pytest.raises(
            gpu_locks.DeviceError, match=r"1 are visible \(0; '9' in CUDA_VISIBLE_DEVICES ="
        ),
        gpu_locks.reserve_gpus(gpu_locks.list_visible_gpus(), 2),
    ):
        pass
    machine("GPU-7")  # a GPU is asked for: it is not trained on the CPU instead
    for device in ("auto", "cuda"):
        with pytest.raises(gpu_locks.DeviceError, match="'GPU-7' in CUDA_VISIBLE_DEVICES"):
            gpu_locks.wants_cuda(device, gpu_locks.list_visible_gpus())
    machine("NoDevFiles")  # as SLURM says that a job has none
    assert not gpu_locks.wants_cuda("auto", gpu_locks.list_visible_gpus())
    with pytest.raises(gpu_locks.DeviceError, match="'NoDevFiles' in CUDA_VISIBLE_DEVICES"):
        gpu_locks.wants_cuda("cuda", gpu_locks.list_visible_gpus())
    for given in (None, "1", "0,-1,5", ""):
        machine(given)
        assert gpu_locks.describe_unknown_visible_gpu() is None


def test_cells_on_cpus_read_no_names_of_gpus(machine):
    machine("1,1")
    with reserve_cell_gpus(settings(device="cpu"), 1) as cuda:
        assert not cuda


def test_the_log_says_which_name_hides_others(machine, capsys):
    machine("1,9,0")
    with reserve_cell_gpus(settings(device="cuda", gpus=1), 1) as cuda:
        assert cuda
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "'9' in CUDA_VISIBLE_DEVICES = '1,9,0' is no GPU" in capsys.readouterr().out


def test_device_setting():
    assert gpu_locks.wants_cuda("auto", ["0"])
    assert gpu_locks.wants_cuda("cuda", ["0"])
    assert not gpu_locks.wants_cuda("cpu", ["0"])
    assert not gpu_locks.wants_cuda("auto", [])
    with pytest.raises(gpu_locks.DeviceError, match="no GPU is visible"):
        gpu_locks.wants_cuda("cuda", [])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_the_reason_of_nvml_is_told_in_the_same_words(tmp_path, monkeypatch, machine, device):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpu_locks, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    machine(**NO_NVML)
    with pytest.raises(
        gpu_locks.DeviceError,
        match=r"nvidia0 is there and NVML does not answer .*version mismatch.*; check",
    ):
        gpu_locks.wants_cuda(device, gpu_locks.list_visible_gpus())


def test_the_reason_of_nvml_is_told_without_a_device_file(monkeypatch, tmp_path, machine):
    monkeypatch.setattr(gpu_locks, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    machine(**NO_NVML)
    with pytest.raises(gpu_locks.DeviceError, match=r"NVML does not answer .*version mismatch"):
        gpu_locks.wants_cuda("cuda", gpu_locks.list_visible_gpus())
    assert not gpu_locks.wants_cuda("auto", gpu_locks.list_visible_gpus())


@pytest.mark.parametrize(
    ("files", "nvml_answers", "variable", "expected"),
    [
        (["nvidia0", "nvidiactl"], False, None, "nvidia0 is there and NVML does not answer"),
        (["nvidia0"], True, None, None),  # a scheduler hides it
        (["nvidia0"], False, "", None),  # the user hides it
        (["nvidiactl"], False, None, None),
    ],
)
def test_a_gpu_that_cannot_be_asked_for_is_not_passed_over(
    tmp_path, monkeypatch, files, nvml_answers, variable, expected
):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(gpu_locks, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    real, failures = nvml.Nvml, {} if nvml_answers else {"nvmlInit": OSError("no library")}
    monkeypatch.setattr(nvml, "Nvml", lambda: real(FakeNvml(gpus=0, failures=failures)))
    assert not gpu_locks.wants_cuda("cpu", gpu_locks.list_visible_gpus())
    if expected is None:
        assert not gpu_locks.wants_cuda("auto", gpu_locks.list_visible_gpus())
        return
    with pytest.raises(gpu_locks.DeviceError, match=expected) as refused:
        gpu_locks.wants_cuda("auto", gpu_locks.list_visible_gpus())
    assert "device: cpu" in str(refused.value)


def test_children_see_only_the_given_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    gpu_locks.set_visible_gpus(["1", "3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,3"


@pytest.mark.parametrize(
    ("variable", "ranks", "cuda", "expected"),
    [
        (f"1,{UUIDS[0]}", [0, 1], True, ["1", UUIDS[0]]),
        ("1,0", [0], True, ["1"]),  # a segment of fewer workers than its block has GPUs
        ("1,0", [0, 1], False, []),
    ],
)
def test_the_sampler_is_told_the_gpus_of_the_cells_own_workers(
    monkeypatch, tmp_path, machine, variable, ranks, cuda, expected
):
    told = []

    def sampler(*args, gpus, foreign_processes):
        told.append(gpus)
        raise InterruptedError

    machine(variable)
    monkeypatch.setattr(agent, "Sampler", sampler)
    monkeypatch.setattr(agent, "run_fork_server", lambda may_share: nullcontext("socket"))
    monkeypatch.setattr(agent, "Process", lambda _, name, *args: SimpleNamespace(name=name))
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "1")  # what is set for the workers is taken back
    job = SimpleNamespace(
        threads=1, n_nodes=1, use_cuda=cuda, is_in_block=False, origin_s=0.0,
        folder=RunFolder(tmp_path),
        to_json=lambda: "{}", list_ranks_on_node=lambda node: ranks,
    )  # fmt: skip
    with pytest.raises(InterruptedError):
        agent.run_node_processes(job, 0)
    assert told == [expected]


def test_what_nohup_ignores_stays_ignored():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        agent.handle_stop_signals(agent.raise_stopped_error)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_threads_are_shared_out():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shared = settings(threads=None)
    assert gpu_locks.count_threads_per_worker(shared, 1, 1, 0) == cores
    assert gpu_locks.count_threads_per_worker(shared, 10 * cores, 1, 0) == 1
    assert gpu_locks.count_threads_per_worker(settings(threads=3), 10 * cores, 1, 0) == 3
