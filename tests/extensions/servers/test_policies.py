"""The update policies against torch.optim.SGD, against slow references, and against mutants."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_reference import REFERENCES, hyper_of
from torch.utils._python_dispatch import TorchDispatchMode

from stratbench.extensions.servers.policies import asynchronous, averaging, ormo, preview
from stratbench.extensions.servers.policies.policies import (
    POLICIES,
    get_policy_class,
    make_policy,
    parse_policy_options,
)
from stratbench.extensions.servers.policies.policy import Hyper, Outcome
from stratbench.extensions.servers.ps.tickets import TicketPlan
from virtual_clock import Timing, simulate

pytestmark = pytest.mark.timeout(300)
NAMES = list(POLICIES)
TAKE_SGD = [name for name in NAMES if not parse_policy_options(name).refusal("sgd")]
TAKE_ADAMW = [name for name in NAMES if not parse_policy_options(name).refusal("adamw")]
#: One worker equals plain SGD push by push; only a batch split in sub-batches is scaled down.
WHOLE_BATCHES = {"ps-async-modified": {"pushes_per_batch": 1}}
#: Forms the same sums in another order: mu v and g are subtracted from W one by one.
BUT_FOR_ROUNDING = {"ps-ormo": {torch.float32: 1e-4, torch.float64: 1e-12}}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, so that 0.0 and -0.0 differ and equal NaNs do not."""
    return tensor.view({torch.float32: torch.int32, torch.float64: torch.int64}[tensor.dtype])


def sgd_says(name: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a policy's weights are torch.optim.SGD's: in every bit, or but for rounding."""
    if name in BUT_FOR_ROUNDING:
        return float((a - b).abs().max()) <= BUT_FOR_ROUNDING[name][a.dtype]
    return same_bits(a, b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


# ---- one worker, and synchronous workers, are torch.optim.SGD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sgd",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 5e-4},
        {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
        {"weight_decay": 5e-4},
    ],
    ids=lambda sgd: "+".join(sgd) or "plain",
)
@pytest.mark.parametrize("name", TAKE_SGD)
def test_one_worker_is_torch_sgd_bit_for_bit(name, sgd, dtype):
    draw = torch.Generator().manual_seed(7)
    start = torch.randn(1003, dtype=dtype, generator=draw)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.037, **sgd)
    policy = make_policy(name, start.clone(), Hyper(lr=0.037, **sgd), WHOLE_BATCHES.get(name))
    assert policy.options.is_synchronous_on_one_worker
    read, version = torch.empty_like(start), policy.view(0, out := torch.empty_like(start))
    read.copy_(out)
    for _ in range(50):
        assert sgd_says(name, read, parameter.detach())
        grad = torch.randn(1003, dtype=dtype, generator=draw) + 0.3 * read
        parameter.grad = grad.clone()
        optimizer.step()
        assert policy.on_push(0, grad, version) is Outcome.APPLIED
        assert policy.ready(0)
        version = policy.view(0, read)
    policy.finish()
    assert sgd_says(name, policy.weights, parameter.detach())


def test_whose_rule_is_for_one_optimizer_refuses_the_other():
    assert TAKE_ADAMW == ["ps-sync", "ps-async", "ps-ssp", "ps-backup", "ps-kbatch", "ps-preview"]
    assert set(NAMES) - set(TAKE_SGD) == {"ps-preview"}
    hyper = Hyper(lr=0.1, optimizer="adamw", betas=(0.9, 0.999), eps=1e-8)
    for name in set(NAMES) - set(TAKE_ADAMW):
        with pytest.raises(
            ValueError, match=f"{name} does not support the optimizer adamw: its rule"
        ):
            make_policy(name, torch.ones(2), hyper)
    with pytest.raises(
        ValueError, match="ps-preview does not support the optimizer sgd: it looks ahead by"
    ):
        make_policy("ps-preview", torch.ones(2), Hyper(lr=0.1))


@pytest.mark.parametrize("decay", [0.0, 1e-2])
@pytest.mark.parametrize("name", TAKE_ADAMW)
def test_one_worker_is_torch_adamw(name, decay):
    """But for rounding: torch's is not one kernel, nor the same on every machine."""
    draw = torch.Generator().manual_seed(7)
    start = torch.randn(1003, dtype=torch.float64, generator=draw)
    parameter = torch.nn.Parameter(start.clone())
    adamw = {"lr": 0.037, "weight_decay": decay, "betas": (0.8, 0.99), "eps": 1e-6}
    optimizer = torch.optim.AdamW([parameter], **adamw)
    hyper = Hyper(optimizer="adamw", **adamw)
    policy = make_policy(name, start.clone(), hyper, WHOLE_BATCHES.get(name))
    for step in range(50):
        grad = torch.randn(1003, dtype=torch.float64, generator=draw)
        parameter.grad = grad.clone()
        optimizer.step()
        assert policy.on_push(0, grad, step) is Outcome.APPLIED
        torch.testing.assert_close(policy.weights, parameter.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sync_averages_in_worker_order_whatever_the_arrival(order):
    draw = torch.Generator().manual_seed(3)
    start = torch.randn(257, generator=draw)
    parameter = torch.nn.Parameter(start.clone())
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    optimizer = torch.optim.SGD([parameter], **sgd)
    policy = make_policy("ps-sync", start.clone(), Hyper(workers=3, **sgd))
    for step in range(6):
        grads = [torch.randn(257, generator=draw) for _ in range(3)]
        parameter.grad = ((grads[0] + grads[1]) + grads[2]) / 3
        optimizer.step()
        outcomes = [policy.on_push(w, grads[w].clone(), step) for w in order]
        assert outcomes == [Outcome.HELD, Outcome.HELD, Outcome.APPLIED]
        assert same_bits(policy.weights, parameter.detach())


def test_a_pushed_gradient_belongs_to_the_caller_again():
    for name, order in itertools.product(NAMES, itertools.permutations(range(3))):
        results = []
        for spoil in (False, True):
            policy = make_policy(name, torch.zeros(5), hyper_of(name, lr=0.1, workers=3))
            for _ in range(3):
                for worker in order:
                    grad = torch.arange(5.0) + worker
                    policy.on_push(worker, grad, policy.version)
                    if spoil:
                        grad.fill_(1e6)
            results.append(policy.weights)
        assert torch.equal(*results), (name, order)


# ---- every policy against its slow reference, under the virtual clock


class Lockstep:
    """A policy and its reference side by side; every answer of the one is checked on the other."""

    def __init__(self, policy, reference):
        self.policy, self.reference = policy, reference
        self.hyper, self.options = policy.hyper, policy.options
        self.weights = policy.weights
        self.pushes = 0

    @property
    def version(self):
        return self.policy.version

    @property
    def lr_share(self):
        return self.policy.lr_share

    @lr_share.setter
    def lr_share(self, share):
        self.policy.lr_share = self.reference.share = share

    def check(self):
        assert self.policy.version == self.reference.version
        self.same(self.policy.weights, self.reference.weights)

    @staticmethod
    def same(tensor, array):
        found = tensor.numpy()
        near = np.abs(found - array) <= 1e-12 + 1e-9 * np.abs(array)
        # numpy's own check takes ten times as long.
        if found.shape != array.shape or not near.all():
            np.testing.assert_allclose(found, array, rtol=1e-9, atol=1e-12)

    def on_push(self, worker, grad, read_version):
        self.pushes += 1
        expected = self.reference.push(worker, grad.numpy().copy(), read_version)
        outcome = self.policy.on_push(worker, grad, read_version)
        assert outcome.value == expected
        self.check()
        return outcome

    def on_skip(self, worker, read_version):
        self.reference.skip(worker, read_version)
        self.policy.on_skip(worker, read_version)
        self.check()

    def on_leave(self, worker):
        self.reference.leave(worker)
        self.policy.on_leave(worker)
        self.check()

    def on_join(self, worker):
        self.reference.join(worker)
        self.policy.on_join(worker)

    def ready(self, worker):
        answer = self.policy.ready(worker)
        assert answer == self.reference.ready(worker)
        return answer

    def view(self, worker, out):
        version = self.policy.view(worker, out)
        self.same(out, self.reference.view(worker))
        return version

    def finish(self):
        self.reference.finish()
        self.policy.finish()
        self.check()


def noisy_quadratic(n, skip_every=0):
    """Gradient of a badly scaled quadratic plus noise that depends on the ticket alone."""
    scale = torch.linspace(0.1, 1.0, n, dtype=torch.float64)

    def gradient(ticket, part, weights):
        if skip_every and ticket.number % skip_every == skip_every - 1:
            return None
        draw = torch.Generator().manual_seed(1000 * ticket.number + part)
        return scale * (weights - 1) + torch.randn(n, dtype=torch.float64, generator=draw)

    return gradient


def run_lockstep(policy_class, reference_class, hyper, options, shards=1, slices=4, **how):
    n = 6
    start = torch.linspace(-1, 1, n, dtype=torch.float64)
    pairs = [
        Lockstep(
            policy_class(piece.clone(), hyper, options),
            reference_class(piece.numpy(), hyper, options),
        )
        for piece in start.chunk(shards)
    ]
    gradient = noisy_quadratic(n, how.pop("skip_every", 0))
    timing = Timing(1.0, 0.1, 0.1, 0.02, 0.5, 0.5, how.pop("slowdown", ()), how.pop("seed", 0))
    trace = simulate(pairs, TicketPlan(1, 12, slices), gradient, timing, **how)
    assert sorted(trace.settled) == list(range(12 * slices))


HYPERS = st.builds(
    Hyper,
    lr=st.sampled_from([0.01, 0.05]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    nesterov=st.booleans(),
    workers=st.integers(1, 4),
).map(lambda h: replace(h, nesterov=h.nesterov and h.momentum > 0))

#: The policies that refuse SGD: a wide epsilon, so that a gradient's size matters, and torch's.
ADAMW_HYPERS = st.builds(
    Hyper,
    lr=st.sampled_from([0.01, 0.05]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    workers=st.integers(1, 4),
    optimizer=st.just("adamw"),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9)]),
    eps=st.sampled_from([1e-8, 0.1]),
)


def falling(pushes):
    """A schedule: it falls with every push, so that no two have the same learning rate."""
    return 1 / (1 + 0.2 * pushes)


OPTION_VALUES = {
    "staleness_bound": st.integers(0, 3),
    "pushes_per_batch": st.integers(1, 3),
    "backups": st.integers(0, 2),
    "k": st.integers(0, 5),
    "dc_lambda": st.sampled_from([0.0, 0.5, 2.0]),
    "dc_decay": st.sampled_from([0.0, 0.95]),
    "step_decay": st.sampled_from([0.5, 0.999]),
    "lr_scale": st.sampled_from(["full", "1/N"]),
    "look_ahead": st.booleans(),
}


def options_for(name):
    options = get_policy_class(name).Options
    values = OPTION_VALUES
    if name == "ps-preview":
        values = values | {"look_ahead": st.sampled_from([0.0, 1.0, 2.0])}
    return st.builds(options, **{f.name: values[f.name] for f in fields(options)})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_policy_does_what_its_reference_does(name, data):
    hyper = data.draw(HYPERS if name in TAKE_SGD else ADAMW_HYPERS)
    options = data.draw(options_for(name))
    hyper = replace(hyper, lr_scale=options.lr_factor(hyper.workers))
    changes = []
    if options.survives_worker_loss and hyper.workers > 1:
        times, others = st.floats(0.0, 12.0), st.integers(1, hyper.workers - 1)
        moves = st.tuples(times, others, st.sampled_from(["leave", "join"]))
        changes = data.draw(st.lists(moves, max_size=6))
    run_lockstep(
        get_policy_class(name),
        REFERENCES[name],
        hyper,
        options,
        shards=data.draw(st.integers(1, 2)),
        slices=data.draw(st.integers(1, 4)),
        seed=data.draw(st.integers(0, 999)),
        slowdown=data.draw(st.lists(st.sampled_from([1.0, 3.0]), max_size=4)),
        skip_every=data.draw(st.sampled_from([0, 5])),
        changes=changes,
        lr_share=data.draw(st.sampled_from([None, falling])),
    )


# ---- wrong policies are found out by the same checks


class SyncSums(averaging.SyncPolicy):
    def on_push(self, worker, grad, read_version):
        return super().on_push(worker, grad.mul_(self.hyper.workers), read_version)


class DanaLooksAheadAlongOwn(asynchronous.DanaPolicy):
    def view(self, worker, out):
        ahead = self.push_lr * self._momenta[0].next_step_momentum_factor
        torch.sub(self.weights, self._sum, alpha=ahead, out=out)
        return self.version


class DanaKeepsLeavers(asynchronous.DanaPolicy):
    def on_leave(self, worker):
        pass


class SspOneMore(asynchronous.SspPolicy):
    def ready(self, worker):
        return self._clock[worker] <= min(self._clock.values()) + self.options.staleness_bound + 1


class BackupTakesLate(averaging.BackupPolicy):
    def on_push(self, worker, grad, read_version):
        return super().on_push(worker, grad, self.version)


class KBatchLosesRest(averaging.KBatchPolicy):
    def finish(self):
        pass


class KBatchCountsOneMore(averaging.KBatchPolicy):
    def __init__(self, *args):
        super().__init__(*args)
        self._k += 1


class StalenessLrOffByOne(asynchronous.StalenessLrPolicy):
    def _compute_gradient_weight(self, staleness):
        return 1 / max(1, staleness)


class StalenessLrScalesVelocity(asynchronous.StalenessLrPolicy):
    def on_push(self, worker, grad, read_version):
        lr = self.push_lr / (1 + self.version - read_version)
        self._optimizer.step(self.weights, grad, lr)
        self.version += 1
        return Outcome.APPLIED


class ModifiedUnweighted(asynchronous.AsyncModifiedPolicy):
    _learning_rate_of_push = asynchronous.AsyncPolicy._learning_rate_of_push


class DcWrongSign(asynchronous.DcAsgdPolicy):
    def on_push(self, worker, grad, read_version):
        self._read[worker].lerp_(self.weights, 2.0)
        return super().on_push(worker, grad, read_version)


class GapForgetsView(asynchronous.GapAwarePolicy):
    def view(self, worker, out):
        out.copy_(self.weights)
        return self.version


class GapMeasuresMomentum(asynchronous.GapAwarePolicy):
    def on_push(self, worker, grad, read_version):
        mean_square = self._mean_square.clone()
        super().on_push(worker, grad, read_version)
        decay, v = self.options.step_decay, self._momentum.value
        self._mean_square.copy_(mean_square.mul_(decay).addcmul_(v, v, value=1 - decay))
        return Outcome.APPLIED


class DanaLooksAheadTooFar(asynchronous.DanaPolicy):
    def view(self, worker, out):
        known = [m for j, m in enumerate(self._momenta) if j != worker and self.hyper.momentum]
        out.copy_(self.weights)
        for m in known:
            out.add_(m.value, alpha=-self.push_lr * self.hyper.momentum)
        return self.version


class AsyncIgnoresScale(asynchronous.AsyncPolicy):
    @property
    def _learning_rate_of_push(self):
        return self.hyper.lr


class OrMoRollsAtOnce(ormo.OrMoPolicy):
    """Counts a bucket's last push as the next one's first."""

    def on_push(self, worker, grad, read_version):
        self.version += 1
        outcome = super().on_push(worker, grad, read_version + 1)
        self.version -= 1
        return outcome


class OrMoTakesAllForInTime(ormo.OrMoPolicy):
    def on_push(self, worker, grad, read_version):
        return super().on_push(worker, grad, self.version)


class OrMoStepsAsIfInTime(ormo.OrMoPolicy):
    """Enters the momentum in order, but moves W by g alone."""

    def on_push(self, worker, grad, read_version):
        n, mu, eta = self.hyper.workers, self.hyper.momentum, self.push_lr
        late = self.version // n - read_version // n
        decayed = grad + self.hyper.weight_decay * self.weights
        outcome = super().on_push(worker, grad, read_version)
        self.weights.add_(decayed, alpha=eta * sum(mu**j for j in range(1, late + 1)))
        return outcome


class OrMoRollsTwice(ormo.OrMoPolicy):
    def on_push(self, worker, grad, read_version):
        if self.version % self.hyper.workers == 1:
            self._bucket = -1
        return super().on_push(worker, grad, read_version)


class OrMoLooksAheadForItselfToo(ormo.OrMoPolicy):
    def view(self, worker, out):
        return super().view(-1, out)


class OrMoLooksAheadForLeavers(ormo.OrMoPolicy):
    def on_leave(self, worker):
        pass


class OrMoLooksAheadAlongTheMomentum(ormo.OrMoPolicy):
    """By all of V, not by what a roll makes of it."""

    def view(self, worker, out):
        share = len(self._present - {worker}) / self.hyper.workers
        torch.sub(self.weights, self._momentum, alpha=self.push_lr * share, out=out)
        return self.version


class OrMoDecaysAfterTheRoll(ormo.OrMoPolicy):
    def on_push(self, worker, grad, read_version):
        n, eta = self.hyper.workers, self.push_lr
        if self.version and self.version % n == 0:
            roll = eta * self.hyper.momentum * self._momentum
            grad.add_(roll, alpha=-self.hyper.weight_decay)
        return super().on_push(worker, grad, read_version)


class OrMoRollsAtTheUnscheduledRate(ormo.OrMoPolicy):
    def on_push(self, worker, grad, read_version):
        begins = self.version and self.version % self.hyper.workers == 0
        rolled = self.hyper.momentum * self._momentum * (self.push_lr - self.lr / self.lr_share / 4)
        outcome = super().on_push(worker, grad, read_version)
        if begins:
            self.weights.add_(rolled)
        return outcome


class DanaForgetsASum(asynchronous.DanaPolicy):
    """A lost worker's momentum stays in the sum until that is made anew."""

    def on_leave(self, worker):
        self._momenta[worker].reset()


class PreviewOfItself(preview.PreviewPolicy):
    """Foresees m and v as they are, as XPipe does, without the unfinished bucket."""

    def view(self, worker, out):
        held = self._sum.clone()
        self._sum.zero_()
        version = super().view(worker, out)
        self._sum.copy_(held)
        return version


class PreviewTakesMissingForZero(preview.PreviewPolicy):
    def view(self, worker, out):
        mean = self._optimizer.mean.clone()
        steps = self._optimizer.steps
        super().view(worker, out)
        if torch.equal(out, self.weights) or not steps:
            return self.version
        (b1, b2), n, lr = self.hyper.betas, self._k, self.lr * self.options.look_ahead
        g = self._sum / n
        root = ((b2 * self._optimizer.square + (1 - b2) * g * g) / (1 - b2 ** (steps + 1))).sqrt()
        u = (b1 * mean + (1 - b1) * g) / (1 - b1 ** (steps + 1)) / (root + self.hyper.eps)
        out.copy_((1 - lr * self.hyper.weight_decay) * self.weights - lr * u)
        return self.version


class PreviewDividesByWhatHasNotSeenIt(preview.PreviewPolicy):
    """The bucket's gradients in m' alone."""

    def view(self, worker, out):
        version, w, t = super().view(worker, out), self.weights, self._optimizer.steps
        if t and not torch.equal(out, w):
            (b1, b2), mean, n = self.hyper.betas, self._optimizer.mean, self._k
            far = self.lr * self.options.look_ahead
            g = self._sum / n + (1 - self._count / n) * mean / (1 - b1**t)
            root = (self._optimizer.square / (1 - b2**t)).sqrt() + self.hyper.eps
            u = (b1 * mean + (1 - b1) * g) / (1 - b1 ** (t + 1)) / root
            out.copy_((1 - far * self.hyper.weight_decay) * w - far * u)
        return version


class PreviewWithoutDecay(preview.PreviewPolicy):
    def view(self, worker, out):
        version = super().view(worker, out)
        if not torch.equal(out, self.weights):
            far = self.lr * self.options.look_ahead
            out.add_(self.weights, alpha=far * self.hyper.weight_decay)
        return version


class PreviewAtTheUnscheduledRate(preview.PreviewPolicy):
    def view(self, worker, out):
        share, self.lr_share = self.lr_share, 1.0
        version = super().view(worker, out)
        self.lr_share = share
        return version


class PreviewCountsLeavers(preview.PreviewPolicy):
    def on_leave(self, worker):
        pass


class PreviewForWhoIsInTime(preview.PreviewPolicy):
    """Looks ahead from the bucket's first push on, also where the reader's own will still be in it."""

    def view(self, worker, out):
        present, self._present = self._present, set(range(-9, 9))
        version = super().view(worker, out)
        self._present = present
        return version


class PreviewCountsSkips(preview.PreviewPolicy):
    def on_skip(self, worker, read_version):
        self._count += 1


class PreviewMovesTheWeights(preview.PreviewPolicy):
    def view(self, worker, out):
        version = super().view(worker, out)
        self.weights.copy_(out)
        return version


class PreviewSpoilsTheSum(preview.PreviewPolicy):
    """The bucket's mean in the place of its sum."""

    def view(self, worker, out):
        version = super().view(worker, out)
        if not torch.equal(out, self.weights):
            self._sum.div_(self._k)
        return version


class PreviewOneStepYounger(preview.PreviewPolicy):
    """Takes out the bias of t steps where the bucket's is the (t + 1)th."""

    def view(self, worker, out):
        steps = self._optimizer.steps
        self._optimizer.steps = max(1, steps - 1)
        version = super().view(worker, out)
        self._optimizer.steps = steps
        return version


class PreviewLosesRest(preview.PreviewPolicy):
    def finish(self):
        pass


LEAVING = {"changes": [(3.0, 1, "leave"), (5.0, 1, "join")]}
MUTANTS = [
    (SyncSums, {}, {}),
    (DanaLooksAheadAlongOwn, {}, {}),
    (DanaKeepsLeavers, {}, LEAVING),
    (SspOneMore, {"staleness_bound": 1}, {}),
    (BackupTakesLate, {}, {}),
    (KBatchLosesRest, {"k": 5}, {}),
    (KBatchCountsOneMore, {}, {}),
    (StalenessLrOffByOne, {}, {}),
    (StalenessLrScalesVelocity, {}, {}),
    (ModifiedUnweighted, {}, {}),
    (DcWrongSign, {}, {}),
    (GapForgetsView, {}, {}),
    (AsyncIgnoresScale, {"lr_scale": "1/N"}, {}),
    (GapMeasuresMomentum, {}, {"nesterov": True}),
    (DanaLooksAheadTooFar, {}, {"nesterov": True}),
    (OrMoRollsAtOnce, {}, {}),
    (OrMoTakesAllForInTime, {}, {}),
    (OrMoStepsAsIfInTime, {}, {}),
    (OrMoRollsTwice, {}, {}),
    (OrMoLooksAheadForItselfToo, {}, {}),
    (OrMoLooksAheadForLeavers, {}, LEAVING),
    (OrMoLooksAheadAlongTheMomentum, {}, {}),
    (OrMoDecaysAfterTheRoll, {}, {"weight_decay": 0.01}),
    (OrMoRollsAtTheUnscheduledRate, {}, {"lr_share": falling}),
    (DanaForgetsASum, {}, LEAVING),
    (PreviewOfItself, {}, {}),
    (PreviewTakesMissingForZero, {}, {}),
    (PreviewDividesByWhatHasNotSeenIt, {}, {}),
    (PreviewWithoutDecay, {}, {"weight_decay": 0.1}),
    (PreviewAtTheUnscheduledRate, {}, {"lr_share": falling}),
    (PreviewCountsLeavers, {}, LEAVING),
    (PreviewForWhoIsInTime, {}, LEAVING),
    (PreviewCountsSkips, {}, {"skip_every": 5}),
    (PreviewMovesTheWeights, {}, {}),
    (PreviewSpoilsTheSum, {}, {}),
    (PreviewOneStepYounger, {}, {}),
    (PreviewLosesRest, {}, {"skip_every": 5}),
]


@pytest.mark.parametrize(
    ("mutant", "given_options", "how"),
    MUTANTS,
    ids=lambda x: getattr(x, "__name__", "+".join(x) if isinstance(x, dict) else str(x)),
)
def test_a_wrong_policy_is_found_out(mutant, given_options, how):
    right = mutant.__base__
    name = next(n for n in NAMES if get_policy_class(n) is right)
    options = parse_policy_options(name, given_options)
    how = {"slowdown": (3.0,), **how}
    sgd = {key: how.pop(key) for key in ("nesterov", "weight_decay") if key in how}
    hyper = hyper_of(name, lr=0.05, workers=4, **sgd)
    hyper = replace(hyper, lr_scale=options.lr_factor(4))
    run_lockstep(right, REFERENCES[name], hyper, options, **dict(how))
    with pytest.raises(AssertionError):
        run_lockstep(mutant, REFERENCES[name], hyper, options, **how)


def test_dana_that_looks_ahead_along_its_own_momentum_is_not_sgd_at_one_worker():
    weights = {}
    for kind in (asynchronous.DanaPolicy, DanaLooksAheadAlongOwn):
        policy = kind(torch.ones(3), Hyper(lr=0.1, momentum=0.9))
        read = torch.empty(3)
        for _ in range(5):
            version = policy.view(0, read)
            policy.on_push(0, read.clone(), version)
        weights[kind] = policy.weights
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    for _ in range(5):
        parameter.grad = parameter.detach().clone()
        optimizer.step()
    assert same_bits(weights[asynchronous.DanaPolicy], parameter.detach())
    assert not torch.allclose(weights[DanaLooksAheadAlongOwn], parameter.detach(), rtol=1e-2)


# ---- rules that deserve a test of their own


@pytest.mark.parametrize("nesterov", [False, True])
def test_dana_reads_what_is_known_of_the_others_next_steps(nesterov):
    """Gradients of zero then carry W exactly there."""
    hyper = Hyper(lr=0.1, momentum=0.9, nesterov=nesterov, workers=3)
    policy = make_policy("ps-dana", torch.randn(50, dtype=torch.float64), hyper)
    for worker in (0, 1, 2, 1):
        policy.on_push(worker, torch.randn(50, dtype=torch.float64), policy.version)
    read = torch.empty(50, dtype=torch.float64)
    policy.view(0, read)
    for worker in (1, 2):
        policy.on_push(worker, torch.zeros(50, dtype=torch.float64), policy.version)
    torch.testing.assert_close(policy.weights, read, rtol=0, atol=1e-12)


def summed_by_the_book(policy, worker):
    """What a worker of ps-dana reads, added up from the momenta of the others one by one."""
    ahead = policy.push_lr * policy._momenta[0].next_step_momentum_factor
    others = [m.value for j, m in enumerate(policy._momenta) if j != worker]
    return policy.weights - ahead * sum(others, torch.zeros_like(policy.weights))


def test_danas_sum_forgets_the_rounding_of_what_was_large():
    """Gradients of a million, then of one: what was rounded away of the first is in no later read."""
    hyper = Hyper(lr=1e-3, momentum=0.9, workers=4)
    policy, read = make_policy("ps-dana", torch.zeros(1000), hyper), torch.empty(1000)
    draw = torch.Generator().manual_seed(1)
    for push in range(4 * 200):
        size = 1e6 if push < 40 else 1.0
        policy.on_push(push % 4, size * torch.randn(1000, generator=draw), policy.version)
    policy.weights.zero_()  # the reads' own rounding would hide the sum's
    policy.view(1, read)
    expected = summed_by_the_book(policy, 1)
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("nesterov", [False, True])
def test_ordered_momentum_forgets_the_order_in_which_pushes_came(nesterov):
    """Gradients of the same buckets in two orders, one with a push three buckets late."""
    hyper = Hyper(lr=0.1, momentum=0.9, nesterov=nesterov, workers=3)
    draw = torch.Generator().manual_seed(5)
    buckets = [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3]  # in which each was read
    grads = torch.randn(len(buckets), 40, dtype=torch.float64, generator=draw)
    results = []
    for order in (range(12), (1, 2, 3, 5, 4, 6, 9, 8, 7, 11, 0, 10)):
        policy = make_policy("ps-ormo", torch.zeros(40, dtype=torch.float64), hyper)
        for i in order:
            assert 3 * buckets[i] <= policy.version
            policy.on_push(i % 3, grads[i].clone(), 3 * buckets[i])
        results.append(policy.weights)
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_a_bucket_is_a_global_batch_whoever_is_there():
    """Of three workers one is lost and one's step overflows: three gradients still make a bucket."""
    policy = make_policy("ps-ormo", torch.zeros(1), Hyper(lr=3.0, momentum=0.5, workers=3))
    read = torch.empty(1)
    policy.on_leave(2)
    for worker in (0, 1, 0):
        policy.on_push(worker, torch.ones(1), 0)
        policy.on_skip(1, 0)
    assert policy.weights.item() == -3.0
    assert policy.view(0, read) == 3
    assert read.item() == -3.0 - 1 / 3 * 0.5 * 3  # one other worker is left, of three
    policy.on_join(2)
    policy.view(0, read)
    assert read.item() == -3.0 - 2 / 3 * 0.5 * 3
    policy.on_push(1, torch.ones(1), 3)
    assert policy.weights.item() == -3.0 - 1.5 - 1.0


def test_ordered_momentum_without_look_ahead_shows_the_weights():
    hyper = Hyper(lr=0.1, momentum=0.9, workers=3)
    read = torch.empty(2)
    for look_ahead in (False, True):
        policy = make_policy("ps-ormo", torch.zeros(2), hyper, {"look_ahead": look_ahead})
        policy.on_push(0, torch.ones(2), 0)
        policy.view(0, read)
        assert torch.equal(read, policy.weights) != look_ahead


ADAMW = {"optimizer": "adamw", "betas": (0.9, 0.999), "eps": 1e-8}


def previewing(workers, start, lr=0.01, **options):
    hyper = Hyper(lr=lr, weight_decay=0.1, workers=workers, **ADAMW)
    return make_policy("ps-preview", start.clone(), hyper, options)


def torch_adamw(start, lr=0.01):
    """A parameter, and torch's own AdamW for it, one kernel after the other."""
    parameter = torch.nn.Parameter(start.clone())
    given_rates = {"betas": ADAMW["betas"], "eps": ADAMW["eps"], "weight_decay": 0.1}
    return parameter, torch.optim.AdamW([parameter], lr=lr, foreach=False, **given_rates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_previewing_worker_is_torch_adamw_bit_for_bit_on_a_schedule(dtype):
    draw = torch.Generator().manual_seed(7)
    start = torch.randn(1003, dtype=dtype, generator=draw)
    (parameter, optimizer), policy = torch_adamw(start), previewing(1, start)
    read = torch.empty_like(start)
    for push in range(200):
        policy.lr_share = falling(push)
        version = policy.view(0, read)
        assert same_bits(read, parameter.detach())
        grad = torch.randn(1003, dtype=dtype, generator=draw) + 0.3 * read
        parameter.grad = grad.clone()
        optimizer.param_groups[0]["lr"] = 0.01 * falling(push)
        optimizer.step()
        assert policy.on_push(0, grad, version) is Outcome.APPLIED
    assert same_bits(policy.weights, parameter.detach())


def test_previewing_workers_that_read_at_a_buckets_begin_are_synchronous_adamw():
    draw, orders = torch.Generator().manual_seed(7), random.Random(7)
    start = torch.randn(100, dtype=torch.float64, generator=draw)
    (parameter, optimizer), policy = torch_adamw(start), previewing(4, start)
    read = torch.empty_like(start)
    for _ in range(60):
        for worker in range(4):
            policy.view(worker, read)
            assert torch.equal(read, policy.weights)
        grads = torch.randn(4, 100, dtype=torch.float64, generator=draw) + 0.3 * read
        for worker in orders.sample(range(4), 4):
            policy.on_push(worker, grads[worker].clone(), policy.version)
        parameter.grad = grads.mean(0)
        optimizer.step()
        torch.testing.assert_close(policy.weights, parameter.detach(), rtol=0, atol=1e-12)


def test_without_look_ahead_previewing_is_averaging_any_n_pushes():
    results = []
    for name, options in (("ps-preview", {"look_ahead": 0}), ("ps-kbatch", {})):
        policy = make_policy(
            name,
            torch.linspace(-1, 1, 6, dtype=torch.float64),
            previewing(4, torch.ones(1)).hyper,
            options,
        )
        timing = Timing(1.0, 0.1, 0.1, 0.02, 0.5, 0.5, (3.0,))
        moves = [(4.0, 1, "leave"), (7.0, 1, "join")]
        simulate([policy], TicketPlan(1, 12, 4), noisy_quadratic(6, 5), timing, moves)
        results.append((policy.weights, policy.version))
    assert same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 10  # of 48 gradients nine overflowed: 39 are left


def test_equal_gradients_are_foreseen_exactly():
    """From the second bucket on; three chunks of a view, the last one short."""
    policy = previewing(4, torch.randn(2 * preview.CHUNK + 7, dtype=torch.float64), look_ahead=1)
    grad, views = torch.randn_like(policy.weights), []
    for push in range(40):
        policy.on_push(push % 4, grad.clone(), policy.version)
        if push < 4:
            continue
        if push % 4 < 3:
            policy.view(push % 4, out := torch.empty_like(grad))
            views.append(out)
            continue
        for read in views:
            torch.testing.assert_close(read, policy.weights, rtol=0, atol=1e-12)
        views.clear()


def test_a_view_changes_nothing_and_is_no_further_than_a_step_of_adamw():
    beta1, beta2 = ADAMW["betas"]
    bound = (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5
    policy, draw = previewing(4, torch.randn(50, dtype=torch.float64)), random.Random(5)
    views = [torch.empty(50, dtype=torch.float64) for _ in range(2)]
    furthest = 0.0
    for push in range(400):
        # Tiny for long, then a million times as large: what v has not seen would be divided by nothing.
        size = 1e6 if push >= 300 else 1.0
        grad = size * torch.randn(50, dtype=torch.float64).abs() * draw.choice([1, 1e-3])
        policy.on_push(push % 4, grad, policy.version)
        moments = policy._optimizer
        kept = [policy.weights, policy._sum, moments.mean, moments.square]
        before = [bits(t).clone() for t in kept]
        for out in views:
            policy.view(1, out)
        assert same_bits(*views)
        assert all(torch.equal(bits(a), b) for a, b in zip(kept, before, strict=True))
        if policy._count:
            far = 2 * policy.lr
            step = ((1 - far * 0.1) * policy.weights - views[0]) / far
            furthest = max(furthest, float(step.abs().max()))
    assert 1 < furthest <= bound


def test_who_is_alone_left_reads_the_weights_and_a_lost_workers_pushes_stay():
    policy, read = previewing(3, torch.zeros(4)), torch.empty(4)
    policy.on_push(1, torch.ones(4), 0)
    assert policy.view(0, read) == 0
    assert not torch.equal(read, policy.weights)  # two others can fill the bucket before it
    policy.on_leave(1)
    policy.on_leave(2)
    policy.view(0, read)
    assert torch.equal(read, policy.weights)
    policy.on_skip(0, 0)
    assert policy._count == 1
    policy.on_push(0, torch.ones(4), 0)
    policy.view(0, read)
    assert torch.equal(read, policy.weights)
    policy.on_join(2)  # now one of two others' pushes is enough
    policy.view(0, read)
    assert not torch.equal(read, policy.weights)
    assert policy.version == 0
    policy.finish()
    assert policy.version == 1  # of the lost worker's gradient and one more
    assert policy.weights.tolist() == pytest.approx([-0.01] * 4)


def test_sync_goes_on_without_a_worker_that_has_finished():
    policy = make_policy("ps-sync", torch.zeros(1), Hyper(lr=1.0, workers=3))
    policy.on_push(0, torch.tensor([2.0]), 0)
    policy.on_push(2, torch.tensor([4.0]), 0)
    assert not policy.ready(0)
    policy.on_leave(1)
    assert policy.ready(0)
    assert policy.ready(2)
    assert policy.weights.item() == -3.0


def test_a_skipped_push_counts_in_the_barrier_but_not_in_the_average():
    policy = make_policy("ps-sync", torch.zeros(1), Hyper(lr=1.0, workers=3))
    policy.on_push(0, torch.tensor([2.0]), 0)
    policy.on_skip(1, 0)
    assert policy.on_push(2, torch.tensor([4.0]), 0) is Outcome.APPLIED
    assert policy.weights.item() == -3.0
    for worker in range(3):
        policy.on_skip(worker, 1)
    assert all(policy.ready(worker) for worker in range(3))
    assert (policy.version, policy.weights.item()) == (1, -3.0)


def test_kbatch_finish_averages_what_is_left():
    policy = make_policy("ps-kbatch", torch.zeros(1), Hyper(lr=1.0, workers=3))
    assert policy.on_push(0, torch.tensor([2.0]), 0) is Outcome.HELD
    assert policy.on_push(0, torch.tensor([4.0]), 0) is Outcome.HELD
    policy.finish()
    assert policy.weights.item() == -3.0
    policy.finish()
    assert policy.version == 1


# ---- memory


class NoNewTensors(TorchDispatchMode):
    """Fails on any operation whose result is not one of its arguments, or a view of one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given_pointers = {
            a.untyped_storage().data_ptr()
            for a in [*args, *(kwargs or {}).values()]
            if isinstance(a, torch.Tensor)
        }
        assert out.untyped_storage().data_ptr() in given_pointers, f"{func} allocates"
        return out


class NothingEmpty(TorchDispatchMode):
    """Fails where memory is taken without being written: it would be touched first inside the clock."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "empty" not in func.__name__, f"{func} leaves its memory untouched"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_policys_memory_is_touched_when_it_is_made(name):
    weights = torch.ones(64)
    with NothingEmpty():
        make_policy(name, weights, hyper_of(name, lr=0.1, workers=3))


SGD, NESTEROV = {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("name", "how"),
    [(n, how) for n in TAKE_SGD for how in (SGD, NESTEROV)] + [(n, ADAMW) for n in TAKE_ADAMW],
)
def test_pushing_and_reading_allocate_no_tensor(name, how):
    hyper = Hyper(lr=0.1, weight_decay=1e-4, workers=3, **how)
    policy, out = make_policy(name, torch.ones(64), hyper), torch.empty(64)
    grads = [torch.randn(64) for _ in range(9)]
    with NoNewTensors():
        for i, grad in enumerate(grads):
            policy.on_push((2, 0, 1)[i % 3], grad, 0 if i < 3 else policy.version - i % 2)
            policy.view(i % 3, out)


def held_tensors(thing, seen):
    """Bytes of the distinct tensors reachable from an object's attributes."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.numel()
    elif isinstance(thing, dict):
        held_tensors(list(thing.values()), seen)
    elif isinstance(thing, (list, tuple, set)):
        for item in thing:
            held_tensors(item, seen)
    elif type(thing).__module__.startswith("stratbench.extensions.servers"):
        held_tensors(getattr(thing, "__dict__", {}), seen)
    return seen


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_buffers_says_what_a_policy_keeps(name, workers):
    n = 2 * preview.CHUNK
    policy = make_policy(name, torch.zeros(n), hyper_of(name, lr=0.1, workers=workers))
    before = sum(held_tensors(policy, {}).values()) - n
    for i in range(3 * workers):
        policy.on_push(i % workers, torch.ones(n), policy.version)
        policy.view(i % workers, torch.empty(n))
    after = sum(held_tensors(policy, {}).values()) - n
    tensors = policy.options.optimizer_buffers(workers)
    if policy.hyper.optimizer == "adamw":  # two moments in the place of a momentum
        tensors += policy.options.momentum_buffers(workers)
    chunk = getattr(policy, "_chunk", None)
    assert before == after == tensors * n + (0 if chunk is None else preview.CHUNK)


# ---- options


def test_options_are_known_without_torch():
    code = (
        "import sys;"
        "from stratbench.extensions.servers.policies.policies import POLICIES, parse_policy_options;"
        "list(map(parse_policy_options, POLICIES)); sys.exit('torch' in sys.modules)"
    )
    package = Path(__file__).parents[3] / "workflow"
    assert subprocess.run([sys.executable, "-c", code], cwd=package, check=False).returncode == 0


def test_every_policy_has_options_with_help_and_a_valid_default():
    for name in NAMES:
        options_class = get_policy_class(name).Options
        for spec in fields(options_class):
            assert spec.metadata["help"]
            assert parse_policy_options(name, {spec.name: spec.default}) == options_class()


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("ps-nothing", {}, "'ps-nothing' is no parameter-server policy; known: ps-sync"),
        ("ps-sync", {"k": 2}, "unknown option 'k'; its options: none"),
        ("ps-ssp", {"bound": 2}, "its options: staleness_bound, lr_scale"),
        ("ps-ssp", {"staleness_bound": -1}, "staleness_bound = -1: must be at least 0"),
        ("ps-ssp", {"staleness_bound": True}, "staleness_bound = true: must be a whole number"),
        ("ps-ssp", {"staleness_bound": 2.5}, "staleness_bound = 2.5: must be a whole number"),
        ("ps-dana", {"lr_scale": "half"}, "lr_scale = 'half': must be 'full' or '1/N'"),
        ("ps-dcasgd", {"dc_decay": 1.0}, "dc_decay = 1.0: must be at least 0 and below 1"),
        ("ps-dcasgd", {"dc_lambda": float("nan")}, "dc_lambda = nan: must be at least 0"),
        ("ps-gap-aware", {"step_decay": "slow"}, "step_decay = 'slow': must be a number"),
    ],
)
def test_wrong_options_are_named(name, options, complaint):
    with pytest.raises(ValueError, match="ps-") as error:
        parse_policy_options(name, options)
    assert complaint in str(error.value)


def test_a_whole_number_is_taken_for_a_number():
    assert parse_policy_options("ps-dcasgd", {"dc_lambda": 1}).dc_lambda == 1.0


@pytest.mark.parametrize(("scale", "factor"), [("full", 1.0), ("1/N", 0.25)])
def test_lr_scale_comes_from_the_options(scale, factor):
    policy = make_policy("ps-async", torch.zeros(1), Hyper(lr=1.0, workers=4), {"lr_scale": scale})
    assert policy.hyper.lr_scale == factor
    policy.on_push(0, torch.ones(1), 0)
    assert policy.weights.item() == -factor
