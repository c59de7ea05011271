"""What goes wrong on GPUs: no memory, a GPU that breaks, other tenants, NCCL errors, a driver that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from design import IMAGES
from machine import Machine

from launching import LaunchedCell, settings, train_one_epoch, until
from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell import record
from stratbench.cell.settings import Settings
from stratbench.extensions.audit.audit import RULES
from stratbench.extensions.audit.rule import AuditData

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 540
#: CUDA's numbers of errors that end all use of a GPU, with what PyTorch says.
ECC = (214, "uncorrectable ECC error")
LAUNCH = (719, "unspecified launch failure")
BUSY = (46, "busy or unavailable")


def on_gpus(strategy: str = "ddp", gpus: int = 2, **changes: object) -> Settings:
    """Settings of a cell of 8 steps."""
    return settings(
        strategy, device="cuda", gpus=gpus, global_batch=32, per_worker_batch=32 // gpus,
        **IMAGES, **changes,
    )  # fmt: skip


@pytest.fixture
def launched(
    machine: Machine, start_cell: Callable[..., LaunchedCell], data: Path
) -> Callable[..., LaunchedCell]:
    """A function that starts a cell on the machine."""
    return lambda s, **options: start_cell(s, **{"data_dir": data, **options})


def failure(cell: LaunchedCell) -> dict:
    """The evidence of a cell that must fail."""
    code, output = cell.finish(LIMIT_S)
    assert code == 1, output
    assert not cell.record.exists()
    return json.loads((cell.logs / record.FAILURE_FILE).read_text())


# ---- memory


@pytest.mark.parametrize("strategy", ["ddp", "ps-sync"])
def test_out_of_memory_is_a_result_wherever_memory_runs_out(
    launched: Callable[..., LaunchedCell], gpus: Callable[..., None], strategy: str
) -> None:
    """The least capacity cannot hold a context (450 MiB); each later one lets the cell come further."""
    ended = []
    for memory_mib in (400, 450, 452, 456, 464, 480, 496, 544):
        gpus(memory_mib=memory_mib)
        cell = launched(on_gpus(strategy, model="resnet-compact"))
        code, output = cell.finish(LIMIT_S)
        assert code == 0, output
        found = record.read_record(cell.record)
        ended.append(found["status"])
        if found["status"] == "ok":
            break
        assert "memory" in found["reason"]
        cell.record.unlink()
    assert ended == ["oom"] * (len(ended) - 1) + ["ok"]
    assert len(ended) > 4


def test_memory_that_cannot_be_pinned_is_out_of_memory(
    launched: Callable[..., LaunchedCell], gpus: Callable[..., None]
) -> None:
    gpus(pinned_mib=1)
    cell = launched(on_gpus("ps-sync"))
    code, output = cell.finish(LIMIT_S)
    assert code == 0, output
    assert record.read_record(cell.record)["status"] == "oom"


# ---- a GPU that breaks


@pytest.mark.parametrize(
    ("strategy", "error", "launches"),
    [("ddp", ECC, 400), ("fsdp", LAUNCH, 400), ("ps-sync", ECC, 400), ("ddp", BUSY, 0)],
)
def test_a_gpu_that_breaks_ends_the_cell_with_its_error_and_its_name(
    launched: Callable[..., LaunchedCell],
    gpus: Callable[..., None],
    machine: Machine,
    strategy: str,
    error: tuple[int, str],
    launches: int,
) -> None:
    code, said = error
    gpus(fault=f"1:{launches}:{code}")
    evidence = failure(launched(on_gpus(strategy)))
    assert said in evidence["reason"]
    assert machine.uuid(1) in json.dumps(evidence), "which of the GPUs was it?"


def test_an_asynchronous_cell_goes_on_without_a_worker_whose_gpu_broke(
    launched: Callable[..., LaunchedCell], gpus: Callable[..., None]
) -> None:
    gpus(fault=f"1:400:{ECC[0]}")
    cell = launched(on_gpus("ps-async"))
    code, output = cell.finish(LIMIT_S)
    assert code == 0, output
    found = record.read_record(cell.record)
    (lost,) = found["server"]["servers"][0]["lost"]
    assert lost["worker"] == 1
    assert "lost-workers" in {rule.id for rule in RULES if any(rule.check(alone(found)))}
    assert ECC[1] in json.dumps(found), "the record says why"


# ---- other tenants


STRANGER = """
import sys, threading, torch
x = torch.zeros({mib} << 20, dtype=torch.uint8, device="cuda:1")
print("there", flush=True)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.01):
    x[:1000].add_(1)
"""


@contextmanager
def stranger(mib: int) -> Iterator[int]:
    """Another process that computes on GPU 1 and holds so much of it; yields its number."""
    process = subprocess.Popen(
        [sys.executable, "-c", STRANGER.format(mib=mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "there\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


def alone(found: record.Record) -> AuditData:
    """A record as evidence, whatever it was trained on."""
    return AuditData(pd.DataFrame(columns=list(COLUMNS)), [found])


def test_memory_that_another_process_holds_is_no_result_of_the_strategy(
    launched: Callable[..., LaunchedCell], machine: Machine
) -> None:
    with stranger(mib=81_000) as pid:
        evidence = failure(launched(on_gpus("fsdp")))
    assert str(pid) in evidence["reason"]


@pytest.mark.parametrize("strategy", ["ddp", "ps-sync"])
def test_another_process_that_computes_on_a_cells_gpu_is_found_by_the_audit(
    launched: Callable[..., LaunchedCell], machine: Machine, strategy: str
) -> None:
    with stranger(mib=1) as pid:
        cell = launched(on_gpus(strategy))
        code, output = cell.finish(LIMIT_S)
    assert code == 0, output
    found = [
        f.values_text for rule in RULES for f in rule.check(alone(record.read_record(cell.record)))
    ]
    assert any(str(pid) in figures for figures in found), found


# ---- NCCL


def test_an_nccl_error_that_a_call_returns_is_the_reason(
    launched: Callable[..., LaunchedCell], gpus: Callable[..., None]
) -> None:
    gpus(nccl_fault="1:10:error")
    evidence = failure(launched(on_gpus()))
    assert "NCCL error" in evidence["reason"]


def test_an_nccl_error_that_the_watchdog_finds_is_the_reason(
    launched: Callable[..., LaunchedCell], gpus: Callable[..., None]
) -> None:
    """PyTorch's watchdog ends the process by SIGABRT."""
    gpus(nccl_fault="1:10:async")
    evidence = failure(launched(on_gpus("ddp", epochs=100_000)))
    assert "remote process exited or there was a network error" in evidence["reason"]


def test_a_cell_that_hangs_before_its_first_step_is_an_error_and_no_result(
    launched: Callable[..., LaunchedCell], gpus: Callable[..., None]
) -> None:
    gpus(nccl_fault="1:0:hang")
    evidence = failure(launched(on_gpus(), time_limit_s=20))
    assert "step" in evidence["reason"]


# ---- the driver


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ({"start_error": 35}, "driver on your system is too old"),
        ({"nvml_error": 18}, "version mismatch"),
        ({"nvml_error": 9}, "Driver Not Loaded"),
    ],
)
def test_a_driver_that_fails_is_told(
    launched: Callable[..., LaunchedCell], gpus: Callable[..., None], problem: dict, said: str
) -> None:
    gpus(**problem)
    evidence = failure(launched(on_gpus()))
    assert said in json.dumps(evidence)


def test_a_cell_that_is_killed_leaves_no_memory_behind(
    launched: Callable[..., LaunchedCell], machine: Machine
) -> None:
    cell = launched(on_gpus("ddp", epochs=100_000))
    train_one_epoch(cell)
    cell.process.kill()
    cell.process.wait()
    program = "import torch; print(*torch.cuda.mem_get_info(0))"

    def free() -> bool:
        left, total = map(int, subprocess.check_output([sys.executable, "-c", program]).split())
        return total - left == 450 << 20  # the context of who asks

    until(free, LIMIT_S)
