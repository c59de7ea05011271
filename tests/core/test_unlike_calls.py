"""Workers that call different shard groups: told so, also where a collective aborts or never ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launching import settings
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.telemetry.heartbeat import MAX_CALLS, Heartbeat, read_shard_group_calls
from stratbench.train import ending
from stratbench.train.agent import Exits, ProcessExit
from stratbench.train.job import Job
from stratbench.train.standing import WorkerState, find_first_step_with_unequal_calls
from stratbench.workload import users_code

#: From its fourth step on rank 1 leaves out a layer of another size: gloo ends the process.
LEAVES_OUT = """
import torch, torch.distributed as dist
from torch import nn
class Part(nn.Sequential): pass
class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a = Part(nn.Flatten(), nn.Linear(256, 64))
        self.b, self.c = Part(nn.Linear(64, 32), nn.Linear(32, 64)), Part(nn.Linear(64, classes))
        self.calls = 0
    def forward(self, x):
        h = self.a(x)
        self.calls += self.training and torch.is_grad_enabled()
        leaves_out = self.calls > 3 and dist.is_initialized() and dist.get_rank() == 1
        return self.c(h if leaves_out else self.b(h))
"""
SAID = (
    "model 'mine': fsdp cannot train it: in step {} the workers called different shard groups, or in another "
    "order, so that they gathered and summed unrelated tensors; call all groups in each forward, and choose "
    "with torch.where or a factor of 0 or 1"
)


@pytest.mark.slow
def test_a_collective_that_gloo_aborts_ends_in_the_sentence_of_the_calls(
    start_cell, warm, tmp_path
):
    (tmp_path / "leaves_out.py").write_text(LEAVES_OUT)
    spec = {"call": "leaves_out.Net", "kwargs": {}, "wrap_classes": ["Part"]}
    own = spec | users_code.compute_code_fingerprint(spec["call"], [tmp_path])
    s = settings("fsdp", model="mine", own_model=own, epochs=3)
    launched = start_cell(s, env=warm | {users_code.CODE_VARIABLE: str(tmp_path)})
    output = launched.finish_with(0)
    found = launched.read_record()
    assert (found["status"], found["reason"]) == ("unsupported", SAID.format(4)), output


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        ((3, [1, 2, 3]), (3, [1, 3]), 4),
        ((3, [1, 2, 3]), (3, [1, 2]), None),  # the slower one
        ((3, [1, 2, 3]), (4, [1, 3]), None),  # of another step
        ((3, []), (3, []), None),  # nobody noted any
    ],
)
def test_a_cell_that_hangs_after_other_calls_is_refused(tmp_path, first, second, step):
    """As with NCCL, which waits where gloo aborts."""
    stood = {
        f"rank{rank}": vars(
            WorkerState(steps, "train", None, 50.0, 0.2, is_hung=True, called_groups=groups)
        )
        for rank, (steps, groups) in enumerate((first, second))
    }
    assert (
        find_first_step_with_unequal_calls(
            {rank: WorkerState(**entry) for rank, entry in enumerate(stood.values())}
        )
        == step
    )
    s = replace(settings("fsdp"), model="mine")
    job = Job(
        cell=Cell("tests", "tiny", "fsdp", s.model, s.dataset, s.gpus, 0), settings=s, data_dir=tmp_path,
        data={"shape": [1, 16, 16], "train_samples": 64}, folder=RunFolder(tmp_path), workers_per_node=2,
        use_cuda=False, threads=1, origin_unix_s=0.0, origin_s=0.0, time_limit_s=10,
    )  # fmt: skip
    job.folder.write_worker_states(0, stood)
    exits = Exits([ProcessExit(name, None) for name in stood], reached_time_limit=True)
    found = ending.classify_ending(job, exits)
    if step is None:
        assert found.status == "error"
        assert found.reason.startswith("it hangs: no worker made progress")
    else:
        assert found == ending.CellEnding("unsupported", SAID.format(step))


def test_calls_are_those_of_the_last_step(tmp_path: Path):
    path = tmp_path / "heartbeat"
    assert read_shard_group_calls(path) == []
    heartbeat = Heartbeat(path)
    for group in (1, 2, 3):
        heartbeat.record_group_call(group)
    heartbeat.record_step()
    assert read_shard_group_calls(path) == [1, 2, 3]
    heartbeat.delete_group_calls()
    for _ in range(MAX_CALLS + 5):
        heartbeat.record_group_call(7)
    assert read_shard_group_calls(path) == [7] * MAX_CALLS
