"""Slow, obvious versions of the parameter server's policies, in plain numpy, to test against.

Each keeps everything it was ever told and, after each step, replays it from the start to answer. None
shares code with the policies.
"""

from __future__ import annotations

import numpy as np

from stratbench.extensions.servers.policies.policies import parse_policy_options
from stratbench.extensions.servers.policies.policy import Hyper


class Reference:
    """What every reference has: the start weights, the hyperparameters, the list of steps."""

    def __init__(self, w0, hyper, options):
        self.w0 = np.array(w0, dtype=np.float64)
        self.lr, self.mu, self.wd = hyper.lr, hyper.momentum, hyper.weight_decay
        self.nesterov, self.n = hyper.nesterov, hyper.workers
        self.eta = hyper.lr * hyper.lr_scale
        self.options = options
        self.share = 1.0  # of the learning rate, by the schedule, now
        self.steps = []  # (gradient, its weight, the share then), one for each update
        self.replayed = None
        self.step_lr = self.eta
        self.live = set(range(self.n))

    def step(self, g, weight=1):
        self.steps.append((g, weight, self.share))

    def replay(self):
        """Weights after every update, the first being w0; and the directions stepped along."""
        if self.replayed is None or len(self.replayed[0]) - 1 != len(self.steps):
            self.replayed = self.replay_from_the_start()
        return self.replayed

    def replay_from_the_start(self):
        w, v, weights, directions = self.w0, None, [self.w0], []
        for g, weight, share in self.steps:
            d = weight * (g + self.wd * w)
            v = d if v is None else self.mu * v + d
            direction = d + self.mu * v if self.nesterov else v
            w = w - self.step_lr * share * direction
            weights.append(w)
            directions.append(direction)
        return weights, directions

    @property
    def weights(self):
        return self.replay()[0][-1]

    @property
    def version(self):
        return len(self.steps)

    def view(self, worker):
        return self.weights

    def ready(self, worker):
        return True

    def skip(self, worker, read_version):
        pass

    def leave(self, worker):
        self.live.discard(worker)

    def join(self, worker):
        self.live.add(worker)

    def finish(self):
        pass


class Async(Reference):
    def push(self, worker, g, read_version):
        self.step(g)
        return "applied"


class StalenessLr(Reference):
    def push(self, worker, g, read_version):
        updates_missed = len(self.steps) - read_version
        self.step(g, 1 / (1 + updates_missed))
        return "applied"


class Ssp(Async):
    def __init__(self, *args):
        super().__init__(*args)
        self.done = [0] * self.n

    def push(self, worker, g, read_version):
        self.done[worker] += 1
        return super().push(worker, g, read_version)

    def skip(self, worker, read_version):
        self.done[worker] += 1

    def join(self, worker):
        others = [self.done[j] for j in self.live]
        self.done[worker] = min(others) if others else 0
        super().join(worker)

    def ready(self, worker):
        slowest = min(self.done[j] for j in self.live)
        return self.done[worker] - slowest <= self.options.staleness_bound


class AsyncModified(Ssp):
    def __init__(self, *args):
        super().__init__(*args)
        self.step_lr = self.eta / self.options.pushes_per_batch

    def push(self, worker, g, read_version):
        self.done[worker] += 1
        age = len(self.steps) - read_version
        self.step(g, 1 / (1 + age))
        return "applied"


class Sync(Reference):
    def __init__(self, *args):
        super().__init__(*args)
        self.step_lr = self.lr
        self.round = {}  # worker -> gradient, or None where it skipped
        self.legacy = []  # the same, of those who have left since

    def complete(self):
        return self.live <= set(self.round)

    def close_if_complete(self):
        entries = self.legacy + [g for _, g in sorted(self.round.items())]
        if not entries or not self.complete():
            return False
        gradients = [g for g in entries if g is not None]
        if gradients:
            self.step(np.mean(gradients, axis=0))
        self.round, self.legacy = {}, []
        return True

    def push(self, worker, g, read_version):
        self.round[worker] = g
        return "applied" if self.close_if_complete() else "held"

    def skip(self, worker, read_version):
        self.round[worker] = None
        self.close_if_complete()

    def leave(self, worker):
        super().leave(worker)
        if worker in self.round:
            self.legacy.append(self.round.pop(worker))
        self.close_if_complete()

    def ready(self, worker):
        return worker not in self.round


class Backup(Sync):
    def __init__(self, *args):
        super().__init__(*args)
        self.late = set()
        self.behind = set()  # a step of skips alone, which leaves the version, went on without them

    def complete(self):
        wanted = max(1, self.n - self.options.backups)
        nobody_else = self.live <= set(self.round) | self.late
        return len(self.round) + len(self.legacy) >= wanted or nobody_else

    def close_if_complete(self):
        before, missing = self.version, self.live - set(self.round) - self.late
        closed = super().close_if_complete()
        if closed:
            self.late = set()
            if self.version == before:
                self.behind |= missing
        return closed

    def is_fresh(self, worker, read_version):
        was_behind = worker in self.behind
        self.behind.discard(worker)
        return read_version == self.version and not was_behind

    def push(self, worker, g, read_version):
        if self.is_fresh(worker, read_version):
            return super().push(worker, g, read_version)
        self.late.add(worker)
        self.close_if_complete()
        return "dropped"

    def skip(self, worker, read_version):
        if self.is_fresh(worker, read_version):
            super().skip(worker, read_version)
        else:
            self.late.add(worker)
            self.close_if_complete()

    def leave(self, worker):
        self.late.discard(worker)
        self.behind.discard(worker)
        super().leave(worker)


class KBatch(Reference):
    def __init__(self, *args):
        super().__init__(*args)
        self.step_lr = self.lr
        self.batch = []

    def push(self, worker, g, read_version):
        self.batch.append(g)
        if len(self.batch) < (getattr(self.options, "k", 0) or self.n):
            return "held"
        self.finish()
        return "applied"

    def finish(self):
        if self.batch:
            self.step(sum(self.batch) / len(self.batch))
        self.batch = []


class DcAsgd(Reference):
    def __init__(self, *args):
        super().__init__(*args)
        self.raw = []

    def push(self, worker, g, read_version):
        self.raw.append(g)
        m = self.options.dc_decay
        mean_square = np.zeros_like(g)
        for old in self.raw:
            mean_square = m * mean_square + (1 - m) * old**2
        weights = self.replay()[0]
        lam = self.options.dc_lambda / np.sqrt(mean_square + 1e-7)
        self.step(g + lam * g * g * (weights[-1] - weights[read_version]))
        return "applied"


class GapAware(Reference):
    def push(self, worker, g, read_version):
        weights, directions = self.replay()
        if directions and read_version != len(self.steps):
            beta, t = self.options.step_decay, len(directions)
            mean_square = sum(
                (1 - beta) * beta ** (t - 1 - k) * d**2 for k, d in enumerate(directions)
            )
            typical_step = self.eta * self.share * np.sqrt(mean_square / (1 - beta**t)) + 1e-8
            g = g / (1 + np.abs(weights[-1] - weights[read_version]) / typical_step)
        self.step(g)
        return "applied"


class Dana(Reference):
    """Steps here are (gradient, worker, share); a worker that leaves starts over with a new momentum."""

    def __init__(self, *args):
        super().__init__(*args)
        self.era = [0] * self.n

    def push(self, worker, g, read_version):
        self.step(g, (worker, self.era[worker]))
        return "applied"

    def leave(self, worker):
        super().leave(worker)
        self.era[worker] += 1

    def now(self):
        w, v = self.w0, {}
        for g, who, share in self.steps:
            d = g + self.wd * w
            v[who] = self.mu * v[who] + d if who in v else d
            w = w - self.eta * share * (d + self.mu * v[who] if self.nesterov else v[who])
        return w, v

    @property
    def weights(self):
        return self.now()[0]

    def view(self, worker):
        """Where W would be if each of the others took one more step, with a gradient of zero."""
        w, v = self.now()
        for j in range(self.n):
            if j != worker and (j, self.era[j]) in v:
                next_v = self.mu * v[j, self.era[j]]
                ahead = self.mu * next_v if self.nesterov else next_v
                w = w - self.eta * self.share * ahead
        return w


class OrMo(Reference):
    """Every gradient by itself: what its push moves W by, and what each later bucket's roll does.

    `steps` are (gradient with decay, bucket it was read in, share at its push).
    """

    def weights_and_momentum(self):
        """W, and V as the last bucket's roll left it and its pushes made it."""
        ahead = int(self.nesterov)
        rolls = [self.steps[first][2] for first in range(0, len(self.steps), self.n)]  # shares
        w, v = self.w0, np.zeros_like(self.w0)
        for number, (g, read, share) in enumerate(self.steps):
            own = number // self.n
            moves = share * sum(self.mu**k for k in range(own - read + 1 + ahead))
            for bucket in range(own + 1, len(rolls)):
                moves += rolls[bucket] * self.mu ** (bucket - read + ahead)
            w = w - self.eta * moves * g
            v = v + self.mu ** (len(rolls) - 1 - read) * g
        return w, v

    def push(self, worker, g, read_version):
        self.step(g + self.wd * self.weights, read_version // self.n)
        return "applied"

    @property
    def weights(self):
        return self.weights_and_momentum()[0]

    def view(self, worker):
        """Where an empty bucket would carry W, as far as the others' share of it goes."""
        w, v = self.weights_and_momentum()
        if not self.options.look_ahead:
            return w
        roll = self.eta * self.share * (self.mu * self.mu * v if self.nesterov else self.mu * v)
        return w - len(self.live - {worker}) / self.n * roll


class Preview(KBatch):
    """AdamW's moments as sums over all gradients so far; `batch` is the bucket that is not full."""

    def __init__(self, w0, hyper, options):
        super().__init__(w0, hyper, options)
        self.betas, self.eps = hyper.betas, hyper.eps

    def unbiased(self, gradients, beta):
        """The running mean of what is in `gradients`, the last one counting most, without its bias."""
        weights = beta ** np.arange(len(gradients))[::-1]
        return weights @ np.array(gradients) / weights.sum()

    def direction(self, gradients):
        mean = self.unbiased(gradients, self.betas[0])
        square = self.unbiased([g**2 for g in gradients], self.betas[1])
        return mean / (np.sqrt(square) + self.eps)

    def moved(self, w, lr, gradients):
        return w - lr * self.wd * w - lr * self.direction(gradients)

    def replay_from_the_start(self):
        weights, seen = [self.w0], []
        for g, _, share in self.steps:
            seen.append(g)
            weights.append(self.moved(weights[-1], self.lr * share, seen))
        return weights, None

    def view(self, worker):
        others, ahead = len(self.live - {worker}), self.options.look_ahead * self.lr * self.share
        missing = self.n - len(self.batch)
        if not self.batch or others < missing or not ahead:
            return self.weights
        seen = [g for g, _, _ in self.steps]
        likely = self.unbiased(seen, self.betas[0]) if seen else 0.0
        mean = (sum(self.batch) + missing * likely) / self.n
        return self.moved(self.weights, ahead, [*seen, mean])


def hyper_of(name, **given):
    """`given` for SGD with momentum, or for AdamW where the policy refuses SGD."""
    if parse_policy_options(name).refusal("sgd"):
        given = {k: v for k, v in given.items() if k not in ("momentum", "nesterov")}
        return Hyper(**{"betas": (0.9, 0.99), "eps": 1e-8} | given, optimizer="adamw")
    return Hyper(**{"momentum": 0.9} | given)


REFERENCES = {
    "ps-sync": Sync,
    "ps-async": Async,
    "ps-async-modified": AsyncModified,
    "ps-ssp": Ssp,
    "ps-backup": Backup,
    "ps-kbatch": KBatch,
    "ps-dcasgd": DcAsgd,
    "ps-gap-aware": GapAware,
    "ps-staleness-lr": StalenessLr,
    "ps-dana": Dana,
    "ps-ormo": OrMo,
    "ps-preview": Preview,
}
