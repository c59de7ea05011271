"""What strategies say they send: against hooks on the real collectives, and DDP's own log."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from launching import settings
from stratbench.cell.run_folder import RunFolder
from stratbench.strategies import get_option_defaults
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.strategies.counted import Counted
from stratbench.strategies.ddp import DDP, SAMPLE_INTERVAL, read_sampled_step_times
from stratbench.strategies.sharding.fsdp import FSDP
from stratbench.strategies.sharding.zero import TorchZeRO1, ZeRO1
from stratbench.strategies.single import Single
from stratbench.telemetry.collective_count import find_process_group
from stratbench.workload.network.trial import run_trial_steps

pytestmark = pytest.mark.timeout(300)


class Growing(Counted, Single):
    """Sends 40 bytes in its first step, twice as many in its second, and so on."""

    def update(self) -> None:
        for _ in range(self.steps + 1):
            dist.all_reduce(torch.zeros(10))
        super().update()


class WarmsUp(Growing):
    """Its first steps do what later ones do not."""

    warms_up = True


#: When FSDP reduces the gradients of a batch in parts.
SYNC = ("each-part", "last-part")
NAMES = {Growing: "single", WarmsUp: "single"}
NAMES |= {DDP: "ddp", FSDP: "fsdp", Single: "single", ZeRO1: "zero1", TorchZeRO1: "zero1-torch"}


@pytest.fixture
def group(request) -> Iterator[int]:
    """A process group of that many ranks, of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def network() -> nn.Sequential:
    """Widths that no group of 2 to 4 divides, so that shards are padded."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(80, 13),
        nn.Linear(13, 3),
    )


def set_up(
    cls: type[Collective],
    world: int,
    precision: str = "fp32",
    max_grad_norm=None,
    gradient_accumulation_steps=1,
    frozen=(),
    depth=0,
    compile=False,
    **options,
) -> Collective:
    name = NAMES[cls]
    given = get_option_defaults(name) | options
    s = settings(
        name,
        gpus=world,
        options=given,
        precision=precision,
        max_grad_norm=max_grad_norm,
        gradient_accumulation_steps=gradient_accumulation_steps,
        compile=compile,
    )
    model = network()
    model = model[:5].extend([nn.Linear(13, 13) for _ in range(depth)]).extend(model[5:])
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)))
    groups = [("convolution", [model[0]]), ("linear", [model[4]])]
    groups += [(f"linear {i}", [model[i]]) for i in range(5, 5 + depth)]
    strategy = cls(cls.Options(**given))
    worker = Worker(s, 0, world, world, torch.device("cpu"), RunFolder(Path()), groups)
    if frozen:
        worker.trial = run_trial_steps("network", model, *batch(), (4, 3), groups)
    strategy.setup(model, worker)
    return strategy


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])


class Collectives(TorchDispatchMode):
    """Bytes that a ring sends for every collective that goes by."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.sent_bytes, self.kinds = world, 0.0, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.partition(".")[0].strip("_")
        if op.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            # All-gather: the output comes first; reduce-scatter: the input is the larger.
            tensors = [
                t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)
            ]
            whole = max(t.numel() * t.element_size() for t in tensors)
            self.kinds.append(name)
            group = find_process_group((args, kwargs))
            ranks = group.size() if group else self.world
            self.sent_bytes += (ranks - 1) / ranks * whole * (2 if name[-6:] == "reduce" else 1)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("group", [1, 2, 3, 4], indirect=True)
@pytest.mark.parametrize("reshard", ["always", "never"])
@pytest.mark.parametrize(
    ("policy", "parts", "sync"),
    [
        *((policy, 1, "each-part") for policy in (False, True)),
        *((policy, parts, sync) for policy, parts in ((False, 2), (True, 4)) for sync in SYNC),
    ],
)
def test_fsdp_gathers_and_scatters_what_it_says(group, reshard, policy, parts, sync):
    options = {"reshard_after_forward": reshard, "gradient_sync": sync}
    if policy:
        options["mixed_precision"] = "policy"
    max_grad_norm = 1.0 if policy else None
    strategy = set_up(FSDP, group, "bf16" if policy else "fp32", max_grad_norm, parts, **options)
    strategy.step(*batch())
    with Collectives(group) as seen:
        strategy.step(*batch())
    said = strategy.communication()
    assert said["sent_bytes_per_step"] == pytest.approx(seen.sent_bytes, abs=1e-6)
    assert said["received_bytes_per_step"] == said["sent_bytes_per_step"]
    assert (seen.sent_bytes == 0) == (group == 1)
    groups = 3 + policy  # two and the root; by the policy also BatchNorm's
    gathers = parts * (groups - 1 + groups if reshard == "always" else groups)
    assert seen.kinds.count("allgather_base") == (gathers if group > 1 else 0)
    reductions = groups * (parts if sync == "each-part" else 1)
    assert seen.kinds.count("reduce_scatter_base") == (reductions if group > 1 else 0)
    if group > 1 and not policy:
        copies = 4 * (group - 1) / group
        every, again = (
            copies * sum(p.numel() for m in modules for p in m.parameters())
            for modules in (network(), [network()[i] for i in (0, 4)])
        )
        assert said["sent_bytes_per_step"] > 2 * every + again * (reshard == "always")  # padding


@pytest.mark.parametrize("group", [3], indirect=True)
@pytest.mark.parametrize("reshard", ["always", "never"])
@pytest.mark.parametrize(
    ("frozen", "depth"),
    [
        *((("0.",), 0), (("0.", "1."), 0), (("0.bias", "4.weight"), 0), (("4.",), 0)),
        *((("4.", "5."), 0), (("5.",), 0), (("0.", "1.", "4.", "5.", "6."), 3)),
        (("0.", "1.", "4.", "5.", "6.", "7."), 3),
    ],
)
@pytest.mark.parametrize("compile", [False, True])
def test_fsdp_gathers_what_is_frozen_and_reduces_only_the_rest(
    group, reshard, frozen, depth, compile, monkeypatch
):
    # Two parts: the test above has one. The graphs are divided as for any backend; this needs no compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    strategy = set_up(
        FSDP, group, "fp32", 1.0, 2, frozen, depth, compile, reshard_after_forward=reshard
    )
    strategy.step(*batch())
    with Collectives(group) as seen:
        strategy.step(*batch())
    sent = strategy.communication()["sent_bytes_per_step"]
    assert sent == pytest.approx(seen.sent_bytes, abs=1e-6)


@pytest.mark.parametrize("group", [4], indirect=True)
@pytest.mark.parametrize("reshard", ["always", "never"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize(("parts", "sync"), [(1, "each-part"), *((2, sync) for sync in SYNC)])
def test_groups_average_their_parts_of_the_gradients(group, reshard, max_grad_norm, parts, sync):
    """Two groups of two: 3(S-1)/S P within, 2(R-1)/R P/S between them, once for all parts of a batch."""
    options = {"shard_group_size": 2, "reshard_after_forward": reshard, "gradient_sync": sync}
    strategy = set_up(
        FSDP, group, max_grad_norm=max_grad_norm, gradient_accumulation_steps=parts, **options
    )
    strategy.step(*batch())
    with Collectives(group) as seen:
        strategy.step(*batch())
    said = strategy.communication()["sent_bytes_per_step"]
    assert said == pytest.approx(seen.sent_bytes, abs=1e-6)
    groups = 3
    assert seen.kinds.count("allreduce") == groups + (max_grad_norm is not None)
    rows = [(p.shape[0], 4 * p.numel() // p.shape[0]) for p in network().parameters()]
    padded = sum(-(-n // 2) * 2 * row for n, row in rows)
    moves = parts + (parts if sync == "each-part" else 1)
    never = 0.5 * moves * padded + 0.5 * 2 * padded / 2 + (4 if max_grad_norm else 0)
    assert said == pytest.approx(never) if reshard == "never" else said > never
    assert strategy.compute_model_state_bytes()["optimizer_bytes"] == padded // 2


@pytest.mark.parametrize("group", [2, 4], indirect=True)
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_gradients_in_16_bits_are_half_the_bytes(group, kind):
    strategy = set_up(DDP, group, compress=kind)
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted_reduction(sent))
        strategy.step(*batch())
    size = sum(2 * p.numel() for p in network().parameters())
    assert sum(sent) == size
    expected = (group - 1) / group * (2 * size + BUFFER_BYTES)
    assert strategy.communication()["sent_bytes_per_step"] == pytest.approx(expected)


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_sends_two_factors_of_a_matrix_and_the_rest_as_it_is(group, rank):
    """The convolution of 5 x 9 and the layers of 13 x 80 and 3 x 13; biases and BatchNorm: 36."""
    strategy = set_up(DDP, group, compress="powersgd", powersgd_rank=rank, powersgd_start_step=2)
    with pytest.MonkeyPatch.context() as patch:
        sent: list[int] = []
        patch.setattr(dist, "all_reduce", counted_reduction(sent))
        for _ in range(4):
            strategy.step(*batch())
    whole = 4 * sum(p.numel() for p in network().parameters())
    vectors = 4 * sum(p.numel() for p in network().parameters() if p.dim() == 1)
    matrices = [(5, 9), (13, 80), (3, 13)]
    factors = sum(
        4 * (rank * (n + m) if 2 * rank * (n + m) < n * m else n * m) for n, m in matrices
    )
    assert sum(sent) == 2 * whole + 2 * (vectors + factors)
    expected = (group - 1) / group * (2 * (whole + vectors + factors) / 2 + BUFFER_BYTES)
    assert strategy.communication()["sent_bytes_per_step"] == pytest.approx(expected)
    feedback = strategy.report()["details"]["feedback_bytes"]
    assert feedback > whole  # the errors, and the factors
    strategy.reset()
    assert strategy.report()["details"]["feedback_bytes"] == 0


def counted_reduction(sent: list[int]):
    """An all-reduce of a group of which only this process exists: it notes the bytes."""

    class Done:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def get_future(self) -> torch.futures.Future:
            done = torch.futures.Future()
            done.set_result([self.tensor])
            return done

    def all_reduce(tensor: torch.Tensor, **kwargs) -> Done:
        sent.append(tensor.numel() * tensor.element_size())
        return Done(tensor)

    return all_reduce


#: Running mean and variance of the network's BatchNorm, and its count of batches.
BUFFER_BYTES = 2 * 5 * 4 + 8


@pytest.mark.parametrize("group", [1, 2, 4], indirect=True)
@pytest.mark.parametrize(("max_grad_norm", "parts"), [(None, 1), (1.0, 2)])
def test_zero1_sends_as_much_as_ddp(group, max_grad_norm, parts):
    """In small buckets of which each is cut by itself; of a batch in parts, the last alone is sent."""
    strategy = set_up(ZeRO1, group, "fp32", max_grad_norm, parts)
    strategy.step(*batch())
    with Collectives(group) as seen:
        strategy.step(*batch())
    said = strategy.communication()
    assert said["sent_bytes_per_step"] == pytest.approx(seen.sent_bytes, abs=1e-6)
    if group == 1:
        assert not seen.kinds
        return
    gathers = [k for k in seen.kinds if "gather" in k]
    scatters = [k for k in seen.kinds if "scatter" in k]
    assert len(gathers) == len(scatters) == len(strategy.buckets)
    assert seen.kinds.count("broadcast") == 2  # of BatchNorm's floats, and of its count
    size = sum(p.numel() * 4 for p in network().parameters())
    padding = sum(bucket.weights.nbytes for bucket in strategy.buckets) - size
    norm = 0 if max_grad_norm is None else 8
    expected = (group - 1) / group * (2 * (size + padding) + BUFFER_BYTES + norm)
    assert said["sent_bytes_per_step"] == pytest.approx(expected)
    assert 0 < padding <= 64 * (8 + group)  # each tensor, and the whole, at most


@pytest.mark.parametrize("group", [2, 4], indirect=True)
def test_torchs_zero1_broadcasts_the_parameters_beside(group):
    strategy = set_up(TorchZeRO1, group)
    seen = reduce_nothing(strategy)
    strategy.step(*batch())
    seen.clear()
    broadcasts = []
    broadcast = dist.broadcast

    def counted(tensor, *args, **kwargs):
        broadcasts.append(tensor.numel() * tensor.element_size())
        return broadcast(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted)
        strategy.step(*batch())
    size = sum(p.numel() * 4 for p in network().parameters())
    assert sum(seen) == sum(broadcasts) == size
    assert len(broadcasts) <= group  # one for each worker's tensors
    expected = (group - 1) / group * (2 * sum(seen) + sum(broadcasts) + BUFFER_BYTES)
    assert strategy.communication()["sent_bytes_per_step"] == pytest.approx(expected)


def reduce_nothing(strategy: Collective) -> list[int]:
    """Take the all-reduce's place, which a group of one process cannot; returns the buckets' bytes."""
    seen = []

    def hook(_, bucket):
        seen.append(bucket.buffer().numel() * bucket.buffer().element_size())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    strategy.module.register_comm_hook(None, hook)
    return seen


@pytest.mark.parametrize("group", [2, 4], indirect=True)
def test_ddp_reduces_and_broadcasts_what_it_says(group):
    strategy = set_up(DDP, group)
    seen = reduce_nothing(strategy)
    strategy.step(*batch())
    expected = (group - 1) / group * (2 * sum(seen) + BUFFER_BYTES)
    assert strategy.communication()["sent_bytes_per_step"] == pytest.approx(expected)


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize(("cls", "step"), [(Growing, 1), (WarmsUp, 3)])
def test_what_only_a_step_tells_is_counted_in_the_warm_up(group, cls, step):
    strategy = set_up(cls, group)
    saved = strategy.save()
    for _ in range(3):
        strategy.step(*batch())
    strategy.restore(saved)
    for _ in range(5):
        strategy.step(*batch())
    assert strategy.communication()["sent_bytes_per_step"] == step * 40


def test_one_process_sends_nothing():
    assert set_up(Single, 1).communication()["sent_bytes_per_step"] == 0


@pytest.mark.parametrize("every", [1, 3, SAMPLE_INTERVAL])
@pytest.mark.parametrize("group", [2], indirect=True)
def test_the_sums_behind_ddps_means(group, every):
    """DDP tells the last step's times and a running mean, but not over how many steps."""
    strategy = set_up(DDP, group)
    reduce_nothing(strategy)
    strategy.module._set_ddp_runtime_logging_sample_rate(every)
    logged = strategy.module._get_ddp_logging_data
    total_ms, times, last = 0.0, 0, 0
    for _ in range(25):
        strategy.step(*batch())
        now = logged()
        if now.get("iteration", 0) != last and now.get("backward_comm_time"):
            last, times = now["iteration"], times + 1
            total_ms += now["backward_comm_time"] / 1e6
        found = read_sampled_step_times(strategy.module, every)
        assert found.steps == times
        assert found.communication_ms == pytest.approx(total_ms, rel=1e-3)
    assert times > 10 or every == SAMPLE_INTERVAL


@pytest.mark.parametrize("group", [2], indirect=True)
def test_ddps_times_are_of_the_timed_steps_only(group):
    strategy = set_up(DDP, group)
    reduce_nothing(strategy)
    saved = strategy.save()
    for _ in range(4):
        strategy.step(*batch())
    strategy.restore(saved)
    assert "exposed_ms" not in strategy.communication()
    for _ in range(6):
        strategy.step(*batch())
    said = strategy.communication()
    assert said["timed_steps"] == 6
    assert said["exposed_ms"] == pytest.approx(said["total_ms"] - said["overlapped_ms"])
    assert said["exposed_ms"] > 0
