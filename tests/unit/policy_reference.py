"""Slow, obvious versions of the parameter server's policies, in plain numpy, to test against.

Each keeps everything it was ever told and, after each step, replays it from the start to answer. None
shares code with the policies.
"""

from __future__ import annotations

import numpy as np


class Reference:
    """What every reference has: the start weights, the hyperparameters, the list of steps."""

    def __init__(self, w0, hyper, options):
        self.w0 = np.array(w0, dtype=np.float64)
        self.lr, self.mu, self.wd = hyper.lr, hyper.momentum, hyper.weight_decay
        self.nesterov, self.n = hyper.nesterov, hyper.workers
        self.eta = hyper.lr * hyper.lr_scale
        self.options = options
        self.steps = []  # (gradient, its weight), one for each update
        self.replayed = None
        self.step_lr = self.eta
        self.live = set(range(self.n))

    def replay(self):
        """Weights after every update, the first being w0; and the directions stepped along."""
        if self.replayed is None or len(self.replayed[1]) != len(self.steps):
            self.replayed = self.replay_from_the_start()
        return self.replayed

    def replay_from_the_start(self):
        w, v, weights, directions = self.w0, None, [self.w0], []
        for g, weight in self.steps:
            d = weight * (g + self.wd * w)
            v = d if v is None else self.mu * v + d
            direction = d + self.mu * v if self.nesterov else v
            w = w - self.step_lr * direction
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
        self.steps.append((g, 1))
        return "applied"


class StalenessLr(Reference):
    def push(self, worker, g, read_version):
        updates_missed = len(self.steps) - read_version
        self.steps.append((g, 1 / (1 + updates_missed)))
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
        self.steps.append((g, 1 / (1 + age)))
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
            self.steps.append((np.mean(gradients, axis=0), 1))
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

    def complete(self):
        wanted = max(1, self.n - self.options.backups)
        nobody_else = self.live <= set(self.round) | self.late
        return len(self.round) + len(self.legacy) >= wanted or nobody_else

    def close_if_complete(self):
        closed = super().close_if_complete()
        if closed:
            self.late = set()
        return closed

    def push(self, worker, g, read_version):
        if read_version == self.version:
            return super().push(worker, g, read_version)
        self.late.add(worker)
        self.close_if_complete()
        return "dropped"

    def skip(self, worker, read_version):
        if read_version == self.version:
            super().skip(worker, read_version)
        else:
            self.late.add(worker)
            self.close_if_complete()

    def leave(self, worker):
        self.late.discard(worker)
        super().leave(worker)


class KBatch(Reference):
    def __init__(self, *args):
        super().__init__(*args)
        self.step_lr = self.lr
        self.batch = []

    def push(self, worker, g, read_version):
        self.batch.append(g)
        if len(self.batch) < (self.options.k or self.n):
            return "held"
        self.finish()
        return "applied"

    def finish(self):
        if self.batch:
            self.steps.append((sum(self.batch) / len(self.batch), 1))
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
        self.steps.append((g + lam * g * g * (weights[-1] - weights[read_version]), 1))
        return "applied"


class GapAware(Reference):
    def push(self, worker, g, read_version):
        weights, directions = self.replay()
        if directions and read_version != len(self.steps):
            beta, t = self.options.step_decay, len(directions)
            mean_square = sum(
                (1 - beta) * beta ** (t - 1 - k) * d**2 for k, d in enumerate(directions)
            )
            typical_step = self.eta * np.sqrt(mean_square / (1 - beta**t)) + 1e-8
            g = g / (1 + np.abs(weights[-1] - weights[read_version]) / typical_step)
        self.steps.append((g, 1))
        return "applied"


class Dana(Reference):
    """Steps here are (gradient, worker); a worker that leaves starts over with a new momentum."""

    def __init__(self, *args):
        super().__init__(*args)
        self.era = [0] * self.n

    def push(self, worker, g, read_version):
        self.steps.append((g, (worker, self.era[worker])))
        return "applied"

    def leave(self, worker):
        super().leave(worker)
        self.era[worker] += 1

    def now(self):
        w, v = self.w0, {}
        for g, who in self.steps:
            d = g + self.wd * w
            v[who] = self.mu * v[who] + d if who in v else d
            w = w - self.eta * (d + self.mu * v[who] if self.nesterov else v[who])
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
                w = w - self.eta * (self.mu * next_v if self.nesterov else next_v)
        return w


class OrMo(Reference):
    """Every gradient as if in time: in its bucket's step of SGD with momentum, up to the last bucket.

    `steps` are (gradient with decay, bucket it was read in). Whatever the order in which they came,
    W is SGD's after the buckets of summed gradients.
    """

    def buckets(self):
        """SGD over all buckets that have begun: weights and momentum after the last."""
        w, v = self.w0, np.zeros_like(self.w0)
        for bucket in range((len(self.steps) - 1) // self.n + 1):
            total = sum((g for g, read in self.steps if read == bucket), np.zeros_like(w))
            v = self.mu * v + total
            w = w - self.eta * (total + self.mu * v if self.nesterov else v)
        return w, v

    def push(self, worker, g, read_version):
        self.steps.append((g + self.wd * self.weights, read_version // self.n))
        return "applied"

    @property
    def weights(self):
        return self.buckets()[0]

    def view(self, worker):
        """Where an empty bucket would carry W, as far as the others' share of it goes."""
        w, v = self.buckets()
        if not self.options.look_ahead:
            return w
        roll = self.eta * (self.mu * self.mu * v if self.nesterov else self.mu * v)
        return w - len(self.live - {worker}) / self.n * roll


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
}
