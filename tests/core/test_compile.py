"""torch.compile: the same training under a collective, a sharded and a served strategy, compiled once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launching import LaunchedCell, settings
from stratbench.cell import record
from stratbench.cell.text.help_page import format_help_address
from stratbench.strategies import compiled
from stratbench.strategies.base import Worker
from stratbench.strategies.single import Single
from stratbench.telemetry.compiling import missing_compiler_reason
from stratbench.workload import users_code
from stratbench.workload.users_code import Refused

pytestmark = pytest.mark.slow
NETWORK = """
from functools import partial

import torch
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
        pooled = nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()
        self.first = nn.Sequential(*pooled, nn.Linear(32, 8))
        self.block, self.last = Block(), nn.Linear(8, classes)

    def forward(self, x):
        return self.last(self.block(self.first(x)))

class Miscompiled(Net):
    def forward(self, x):
        h = self.block(self.first(x))
        return self.last(h.detach() if torch.compiler.is_compiling() else h)

def by_no_compiler(classes, network):
    torch.compile = partial(torch.compile, backend="aot_eager")
    return globals()[network](classes)
"""


def by_no_compiler(code: dict[str, Any], network: str) -> dict[str, Any]:
    """What the settings say of a network that is compiled as others are, but to no C++."""
    return code | {"call": "small_net.by_no_compiler", "kwargs": {"network": network}}


#: One worker computes what two do, and the second would compile the same once more.
ALONE = {"gpus": 1, "per_worker_batch": 16}


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the settings say of a small network whose file lies in `tmp_path`.

    It has convolutions: PyTorch 2.13 gave those of VGG gradients of zero on some CPUs.
    """
    (tmp_path / "small_net.py").write_text(NETWORK)
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    spec = {"call": "small_net.Net", "kwargs": {}, "wrap_classes": ["Block"]}
    return spec | users_code.compute_code_fingerprint(spec["call"], [tmp_path])


@pytest.mark.timeout(500)
def test_a_compiled_training_is_the_same_and_compiles_in_the_warm_up(
    start_cell: Callable[..., LaunchedCell],
    warm: dict[str, str],
    code: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The last test batch is smaller than the others, and evaluation is not compiled.

    What C++ computes depends on no strategy: one has it made.
    """
    if reason := missing_compiler_reason(cuda=False):
        pytest.skip(reason)
    epochs = {}
    for strategy, compiles in (("ddp", False), ("ddp", True), ("fsdp", True), ("ps-sync", True)):
        network = code if strategy == "ddp" else by_no_compiler(code, "Net")
        s = settings(
            strategy, model="net", own_model=network, precision="fp64", epochs=2, compile=compiles,
            **({} if strategy == "fsdp" else ALONE),
        )  # fmt: skip
        cell = start_cell(s, env=warm | {users_code.CODE_VARIABLE: str(tmp_path)})
        exit_code, output = cell.finish(timeout_s=300)
        assert exit_code == 0, output
        rec = record.read_record(cell.record)
        if rec["status"] == "unsupported" and network is code:  # by what this CPU has
            assert "wrong gradients" in rec["reason"]
            continue
        epochs[strategy, compiles] = rec["score"]["per_epoch"]
        time = rec["time"]
        if compiles:
            assert 0 < time["compile_s"] <= time["warmup_s"], strategy
            assert time["compilations"] >= 2, strategy  # forward and backward
            assert time["recompilations"] == 0, strategy
        else:
            assert "compile_s" not in time
    eager = epochs.pop(("ddp", False))
    for strategy, trained in epochs.items():
        for one, other in zip(eager, trained, strict=True):
            for key in ("train_loss", "test_loss"):
                assert other[key] == pytest.approx(one[key], abs=1e-9, rel=0), strategy


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["fsdp", "ps-sync"])
def test_code_that_computes_other_gradients_is_refused(
    start_cell: Callable[..., LaunchedCell],
    warm: dict[str, str],
    code: dict[str, Any],
    tmp_path: Path,
    strategy: str,
) -> None:
    """Its loss is right in each step, and no gradient reaches the layers before the last."""
    if reason := missing_compiler_reason(cuda=False):
        pytest.skip(reason)
    wrong = by_no_compiler(code, "Miscompiled")
    s = settings(strategy, model="net", own_model=wrong, compile=True, **ALONE)
    cell = start_cell(s, env=warm | {users_code.CODE_VARIABLE: str(tmp_path)})
    exit_code, output = cell.finish(timeout_s=300)
    assert exit_code == 0, output
    rec = record.read_record(cell.record)
    assert rec["status"] == "unsupported"
    assert "compile = true: code compiled by PyTorch" in rec["reason"]
    assert rec["reason"].endswith(
        f"set compile to false {format_help_address('computes wrong gradients')}"
    )


class Planted(torch.nn.Module):
    """Stands for compiled code: no gradient reaches a network's first layers."""

    def __init__(self, network: torch.nn.Sequential, right: bool) -> None:
        super().__init__()
        self.network, self.right = network, right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.network[:-1](x)
        return self.network[-1](h if self.right else 0.0 * h + h.detach())


class NumpyNoise(torch.nn.Module):
    """Draws from numpy's generator, of which torch's knows nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(np.random.uniform(0.5, 1.5, x.shape)).to(x.dtype)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("noise", [torch.nn.Identity(), torch.nn.Dropout(0.5), NumpyNoise()])
@pytest.mark.parametrize("right", [True, False])
def test_gradients_are_compared_by_size_where_they_are_drawn_at_random(right, noise, precision):
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 40), noise, torch.nn.Linear(40, 3)
    network = torch.nn.Sequential(*layers)
    s = settings("single", gpus=1, per_worker_batch=16, precision=precision)
    worker = Worker(s, 0, 1, 1, torch.device("cpu"), None, [])
    strategy = Single(Single.Options())
    strategy.setup(network, worker)
    strategy.compiled = planted = Planted(network, right)
    batch = torch.randn(16, 20), torch.randint(3, (16,))
    with nullcontext() if right else pytest.raises(Refused, match="computes wrong gradients"):
        compiled.check_compiled_gradients(strategy, worker, *batch)
    assert strategy.compiled is planted


def test_without_a_compiler_a_cell_ends_in_one_sentence(
    start_cell: Callable[..., LaunchedCell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    cell = start_cell(settings("ddp", compile=True), env=os.environ)
    output = cell.finish_with(1)
    assert (
        "compile = true: torch.compile needs the compiler 'no-such-compiler', which is missing"
        in output
    )
    assert not list(cell.folder.list_log_paths())
