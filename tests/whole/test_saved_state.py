"""A warm-up leaves no trace: after `restore`, every strategy trains as if there had been none.

Bit for bit, with one worker. Mutants forget one thing each, and must train otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from launching import IN_OUR_LOOP, each_strategy, settings
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.strategy import make_server_configs
from stratbench.extensions.servers.wire.handshake import load_secret, make_secret, write_secret
from stratbench.strategies import get_option_defaults, get_strategy_class
from stratbench.strategies.base import Strategy, Worker
from stratbench.strategies.saved import SavedState
from stratbench.strategies.single import Single
from stratbench.telemetry.memory import get_optimizer_state

pytestmark = pytest.mark.timeout(300)

STEPS, BATCH, CLASSES = 5, 8, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def settings_of(name: str, precision: str):
    return settings(
        name, options=get_option_defaults(name), gpus=1, global_batch=BATCH, per_worker_batch=BATCH,
        precision=precision, momentum=0.9, lr=0.05, weight_decay=1e-3,
    )  # fmt: skip


def network(precision: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    ]
    return nn.Sequential(*layers).to(torch.float64 if precision == "fp64" else torch.float32)


def trained(
    name: str,
    folder: Path,
    warm: bool,
    cls: type[Strategy] | None = None,
    precision: str = "fp64",
) -> list[Any]:
    """Losses, weights, buffers and report after STEPS steps of one worker, warmed up before or not."""
    s = settings_of(name, precision)
    made = cls or get_strategy_class(name)
    strategy = made(made.Options(**s.options))
    model = network(precision)
    if strategy.kind == "server":
        serve_on_thread(s, folder)
    strategy.setup(model, Worker(s, 0, 1, 1, CPU, RunFolder(folder), [("linear", [model[4]])]))
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    x = torch.randn(STEPS * BATCH, 1, 6, 6, generator=generator).to(dtype)
    y = torch.randint(CLASSES, (len(x),), generator=generator)
    if warm:
        saved = strategy.save()
        for scale in (-3, 1e30 if precision == "fp16" else 5, 2):
            strategy.step(scale * x[:BATCH], y[:BATCH])
        with strategy.open_evaluation_model() as evaluated, torch.no_grad():
            evaluated(x[:4])
        strategy.restore(saved)
    losses = []
    if strategy.kind == "server":
        losses = [strategy.step(x[where], y[where]) for _, where in strategy.iter_tickets()]
        strategy.load_snapshot(0)
    else:
        losses = [strategy.step(x[i], y[i]) for i in strategy.batches(torch.arange(len(x)), 0)]
    report = strategy.report()
    strategy.close()
    held = [t.detach().clone() for t in (*strategy.weights_and_buffers(), *losses)]
    return [*held, report["updates_applied"], report["details"]["skipped_steps"]]


def serve_on_thread(s, folder: Path) -> None:
    run_folder = RunFolder(folder)
    write_secret(run_folder.job_secret_path, make_secret())
    [config] = make_server_configs(s, STEPS * BATCH, run_folder, None)
    arguments = (config, load_secret(run_folder.job_secret_path))
    threading.Thread(target=run_server, args=arguments, daemon=True).start()


def equal(one: list[Any], other: list[Any]) -> bool:
    """Bit for bit; NaN is equal to itself."""
    assert len(one) == len(other)
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) if torch.is_tensor(a) else a == b
        for a, b in zip(one, other, strict=True)
    )


def both(folder: Path, name: str, **how: Any) -> tuple[list[Any], list[Any]]:
    for part in ("cold", "warm"):
        (folder / part).mkdir()
    cold = trained(name, folder / "cold", warm=False, **how)
    return cold, trained(name, folder / "warm", warm=True, **how)


#: Strategies that take any network; test_pipeline.py warms up the others.
ABLE = [name for name in IN_OUR_LOOP if name != "pipeline"]


@pytest.mark.parametrize("name", each_strategy(ABLE))
def test_a_warm_up_leaves_no_trace(name, tmp_path):
    cold, warm = both(tmp_path, name)
    assert equal(cold, warm)
    assert all(bool(t.isfinite().all()) for t in cold if torch.is_tensor(t))


@pytest.mark.parametrize("name", ["single", "ps-sync"])
def test_nor_does_an_overflow_in_it(name, tmp_path):
    """The loss scale begins anew, and the momentum from zero, whether or not a step was skipped."""
    assert equal(*both(tmp_path, name, precision="fp16"))


# ---------------------------------------------------------------- more than SGD, and mutants


class Rich(Single):
    """AdamW with a falling learning rate; pulls the weights to their running mean; feeds back an error.

    AdamW's moments come with the first step. The error is begun anew like a hook's state, the others
    are brought back.
    """

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.local, lr=0.02, amsgrad=True)

    def setup(self, model: nn.Module, worker: Worker) -> None:
        super().setup(model, worker)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.8**step)
        self.means = [t.detach().clone() for t in self.local]

    def extra_state(self) -> list[Any]:
        return [*self.means, self.schedule]

    def reset(self) -> None:
        super().reset()
        self.error: Tensor | None = None

    def assign_gradients_to_updated_tensors(self) -> None:
        gradient = self.local[0].grad
        if self.error is not None:
            gradient.add_(self.error)
        self.error = gradient * 0.1

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step(x, y)
        self.schedule.step()
        with torch.no_grad():
            for t, mean in zip(self.local, self.means, strict=True):
                mean.lerp_(t, 0.1)
                t.lerp_(mean, 0.1)
        return loss


def test_extra_state_and_another_optimizer_are_brought_back(tmp_path):
    assert equal(*both(tmp_path, "single", cls=Rich))


class LosesExtraState(Rich):
    """Mutant."""

    def extra_state(self) -> list[Any]:
        return []


class LosesSchedule(Rich):
    """Mutant."""

    def extra_state(self) -> list[Any]:
        return self.means


class KeepsError(Rich):
    """Mutant: `reset` forgets the error."""

    def reset(self) -> None:
        error = getattr(self, "error", None)
        super().reset()
        self.error = error


class KeepsCount(Single):
    """Mutant: `reset` forgets the count of steps."""

    def reset(self) -> None:
        steps = getattr(self, "steps", 0)
        super().reset()
        self.steps = steps


@pytest.mark.parametrize("cls", [LosesExtraState, LosesSchedule, KeepsError, KeepsCount])
def test_a_strategy_that_forgets_something_is_found_out(cls, tmp_path):
    assert not equal(*both(tmp_path, "single", cls=cls))


def keep_moments(self: SavedState, optimizer: torch.optim.Optimizer) -> None:
    """Mutant: the optimizer's state stays as the warm-up has left it."""


def keep_late_moments(self: SavedState, optimizer: torch.optim.Optimizer) -> None:
    """Mutant: what was not there when it was saved stays."""
    late = dict(optimizer.state)
    PUT_BACK(self, optimizer)
    optimizer.state.update({p: entry for p, entry in late.items() if p not in optimizer.state})


def keep_settings(self: SavedState, optimizer: torch.optim.Optimizer) -> None:
    """Mutant: the learning rate stays as the warm-up has left it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    PUT_BACK(self, optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


PUT_BACK = SavedState._restore_optimizer


@pytest.mark.parametrize(
    ("mutant", "cls"),
    [
        (keep_moments, Single),
        (keep_moments, Rich),
        (keep_late_moments, Rich),
        (keep_settings, Rich),
    ],
)
def test_a_restore_that_forgets_something_is_found_out(
    mutant: Callable, cls, tmp_path, monkeypatch
):
    monkeypatch.setattr(SavedState, "_restore_optimizer", mutant)
    assert not equal(*both(tmp_path, "single", cls=cls))


# ---------------------------------------------------------------- the copies themselves


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "LBFGS", "RMSprop", "ZeRO"])
def test_any_optimizers_state_comes_back_wherever_it_was(kind):
    """Saved after a step; cleared, changed or untouched since; put back twice."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))]
    more = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    if kind == "ZeRO":  # which keeps its state in the optimizer that it wraps
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.Adam, lr=0.1)
    else:
        optimizer = getattr(torch.optim, kind)(weights, lr=0.1, **more)

    def step() -> list[Tensor]:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = sum((w - i - 1).pow(4).sum() for i, w in enumerate(weights))
            value.backward()
            return value

        optimizer.step(loss)
        return [w.detach().clone() for w in weights]

    step()
    saved = SavedState(weights, optimizer, [])
    expected = step()
    for spoil in (step, get_optimizer_state(optimizer).clear, lambda: None):
        spoil()
        saved.restore_into(weights, optimizer, [])
        assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))


def test_state_is_put_back_where_it_lies():
    """A hook or a view that holds the tensor goes on with it."""
    weight = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    saved = SavedState([weight], optimizer, [])
    optimizer.step()
    saved.restore_into([weight], optimizer, [])
    assert optimizer.state[weight]["momentum_buffer"] is momentum
    assert bool((momentum == 1).all())
    optimizer.state.clear()
    saved.restore_into([weight], optimizer, [])
    assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()


def test_all_that_is_saved_of_a_gpu_waits_in_host_memory():
    with FakeTensorMode():
        weights = [torch.empty(4, device="cuda"), torch.empty(2, 3, device="cuda").half()]
        saved = SavedState(weights, None, [torch.empty(5, device="cuda")])
    kept = [*saved._tensors, *(k.copy for k in saved._extra)]
    assert [(t.device.type, t.dtype, t.numel()) for t in kept] == [
        ("cpu", torch.float32, 4), ("cpu", torch.float16, 6), ("cpu", torch.float32, 5),
    ]  # fmt: skip


def test_extra_state_that_grows_is_refused():
    extra = [torch.zeros(2)]
    saved = SavedState([], None, extra)
    with pytest.raises(ValueError, match="1 entries at the save and 2 at the restore"):
        saved.restore_into([], None, [*extra, torch.zeros(2)])
