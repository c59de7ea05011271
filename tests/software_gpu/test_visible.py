"""GPUs as users name them in CUDA_VISIBLE_DEVICES: by number, UUID or its beginning, twice, wrongly, MIG."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from design import IMAGES
from machine import Machine

from launching import WORKFLOW, LaunchedCell, settings, sharing
from stratbench.cell import record
from stratbench.cell.record import Record
from stratbench.cell.settings import Settings

pytestmark = pytest.mark.timeout(900)
VARIABLE = "CUDA_VISIBLE_DEVICES"


def name_of(machine: Machine, name: str) -> str:
    """`2`, `uuid 2`, `half 2` or `mig 2` as a user writes it."""
    kind, _, gpu = name.rpartition(" ")
    if not kind:
        return gpu
    uuid = machine.uuid(int(gpu), mig=kind == "mig")
    return uuid[:12] if kind == "half" else uuid


def gpus_of(found: Record) -> list[int | None]:
    return [worker["provenance"]["gpu"].get("index") for worker in found["workers"]]


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (("2", "3"), [2, 3]),
        (("3", "1", "0"), [3, 1]),
        (("uuid 3", "uuid 1"), [3, 1]),
        (("half 2", "half 0"), [2, 0]),
        (("0", "uuid 2"), [0, 2]),
        (("1", "2", "-1", "3"), [1, 2]),
    ],
    ids=str,
)
def test_a_cell_uses_the_gpus_that_it_is_shown(
    trained: Callable[..., Record],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    used: list[int],
) -> None:
    monkeypatch.setenv(VARIABLE, ",".join(name_of(machine, name) for name in names))
    found = trained(settings("ddp", device="cuda", **IMAGES))
    assert (found["status"], gpus_of(found)) == ("ok", used)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("1", "1"), f"{VARIABLE} = .* twice"),
        (("2", "uuid 2"), f"{VARIABLE} = .* twice"),
        (("half 3", "3"), f"{VARIABLE} = .* twice"),
        (("0", "9"), VARIABLE),
        (("0", "-1", "2"), r"1 are visible \(0\)"),
        (("NoDevFiles",), VARIABLE),
    ],
    ids=str,
)
def test_gpus_that_cannot_be_used_are_refused_and_told(
    start_cell: Callable[..., LaunchedCell],
    machine: Machine,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setenv(
        VARIABLE, ",".join(n if n == "NoDevFiles" else name_of(machine, n) for n in names)
    )
    cell = start_cell(settings("ddp", device="cuda", **IMAGES), data_dir=data)
    lines = []
    for line in cell.process.stdout:  # until it ends, or waits for a GPU that no cell holds
        lines.append(line)
        assert "waiting for" not in line, "".join(lines)
    assert cell.process.wait() == 1
    evidence = json.loads((cell.logs / record.FAILURE_FILE).read_text())
    assert re.search(said, evidence["reason"])


def test_a_job_without_gpus_trains_on_the_cpu(
    trained: Callable[..., Record], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older SLURM names `NoDevFiles` where a job has none."""
    monkeypatch.setenv(VARIABLE, "NoDevFiles")
    found = trained(settings("ddp", device="auto", **IMAGES))
    assert (found["status"], found["provenance"]["device"]) == ("ok", "cpu")
    assert "software_gpu" not in found["provenance"], "its figures are the CPU's"


def test_cells_of_a_job_that_has_gpus_share_a_fork_server_and_leave_nothing_on_them(
    start_cell: Callable[..., LaunchedCell],
    machine: Machine,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def output_of(s: Settings) -> str:
        launched = start_cell(s, data_dir=data)
        code, output = launched.finish(600)
        assert code == 0, output
        found = record.read_record(launched.record)
        [busy] = found["provenance"]["busy_at_start"].values()
        assert not busy.get("other_gpu_processes")
        assert (found["status"], gpus_of(found)) == ("ok", [2, 3][: s.gpus])
        held = [process.pid for process in machine.processes() if any(process.used_bytes)]
        assert not any(map(psutil.pid_exists, held))
        return output

    shared = "this run's cells share a fork server"
    cells = [settings(name, device="cuda", **IMAGES) for name in ("ddp", "fsdp")]
    monkeypatch.setenv(VARIABLE, "2,3")
    with sharing():
        for s in cells:
            assert shared in output_of(s)
        # One GPU of two is another choice.
        one = settings("single", device="cuda", **IMAGES | {"gpus": 1, "per_worker_batch": 16})
        assert shared not in output_of(one)
    assert shared not in output_of(cells[0])


def test_all_names_of_a_gpu_are_one_lock(machine: Machine) -> None:
    names = [name_of(machine, name) for name in ("2", "uuid 2", "half 2")]
    program = (
        "import sys; from stratbench.train import gpu_locks\n"
        "print(*gpu_locks.get_lock_names_by_gpu(sys.argv[1:]).values())"
    )
    printed = subprocess.check_output(
        [sys.executable, "-c", program, *names],
        env=os.environ | {"PYTHONPATH": str(WORKFLOW)},
        text=True,
    )
    assert set(printed.split()) == {machine.uuid(2)}


def test_a_mig_instance_is_known_by_its_own_name(
    trained: Callable[..., Record],
    gpus: Callable[..., None],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(mig=1)
    monkeypatch.setenv(VARIABLE, ",".join(name_of(machine, n) for n in ("mig 2", "mig 0")))
    found = trained(settings("ddp", device="cuda", **IMAGES))
    assert found["status"] == "ok"
    used = [worker["provenance"]["gpu"]["uuid"] for worker in found["workers"]]
    assert used == [machine.uuid(2, mig=True), machine.uuid(0, mig=True)]
    assert found["compute"].get("mfu") is None, "a part of a GPU has no datasheet"
    assert found["energy"] is None or found["energy"]["train_joules"] is None
