"""torch.compile: the same training under a collective, a sharded and a served strategy, compiled once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launching import LaunchedCell, settings
from stratbench.cell import record
from stratbench.telemetry.compiling import missing_compiler
from stratbench.workload import users_code

pytestmark = pytest.mark.slow
NETWORK = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x).tanh()

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(256, 8), Block(), nn.Linear(8, classes)

    def forward(self, x):
        return self.last(self.block(self.first(x.flatten(1))))
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the settings say of a small network whose file lies in `tmp_path`."""
    (tmp_path / "small_net.py").write_text(NETWORK)
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    spec = {"call": "small_net.Net", "kwargs": {}, "shard": ["Block"]}
    return spec | users_code.fingerprint(spec["call"], [tmp_path])


@pytest.mark.timeout(500)
def test_a_compiled_training_is_the_same_and_compiles_in_the_warm_up(
    start_cell: Callable[..., LaunchedCell],
    warm: dict[str, str],
    code: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The last test batch is smaller than the others, and evaluation is not compiled."""
    if reason := missing_compiler(cuda=False):
        pytest.skip(reason)
    epochs = {}
    for strategy, compiles in (("ddp", False), ("ddp", True), ("fsdp", True), ("ps-sync", True)):
        s = settings(
            strategy, model="net", own_model=code, precision="fp64", epochs=2, compile=compiles
        )
        cell = start_cell(s, env=warm | {users_code.CODE_VARIABLE: str(tmp_path)})
        exit_code, output = cell.finish(timeout_s=300)
        assert exit_code == 0, output
        rec = record.read(cell.record)
        epochs[strategy, compiles] = rec["score"]["per_epoch"]
        time = rec["time"]
        if compiles:
            assert 0 < time["compile_s"] <= time["warmup_s"], strategy
            assert time["compilations"] >= 2, strategy  # forward and backward
            assert time["recompilations"] == 0, strategy
        else:
            assert "compile_s" not in time
    eager = epochs.pop(("ddp", False))
    for strategy, compiled in epochs.items():
        for one, other in zip(eager, compiled, strict=True):
            for key in ("train_loss", "test_loss"):
                assert other[key] == pytest.approx(one[key], abs=1e-9, rel=0), strategy


def test_without_a_compiler_a_cell_ends_in_one_sentence(
    start_cell: Callable[..., LaunchedCell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    cell = start_cell(settings("ddp", compile=True), env=os.environ)
    exit_code, output = cell.finish()
    assert exit_code == 1
    assert (
        "compile = true: torch.compile needs a compiler, and there is no 'no-such-compiler'"
        in output
    )
    assert not list(cell.folder.process_logs())
