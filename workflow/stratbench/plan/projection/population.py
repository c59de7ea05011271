"""Projects from a few counts alone, where no link was measured: what losses other clusters have had.

A step is computing and losses of known shapes: a ring's volume within and between nodes, leaving the first
node, steps that grow with log N and with N, work that does not shrink with the batch. How large each is in
published measurements is the prior (`PRIOR`; `benchmarks/projection_prior.py` makes it), and the measured
counts weigh it. What the counts leave open stays open in the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from stratbench.plan.projection.naive import Measured, Scaling, a_plus_b_over_n

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Bytes a second to another GPU of a node, one way, by a word of the GPU's name; others have PCIe.
LINKS = {"H100": 450e9, "H200": 450e9, "A100": 300e9, "V100": 150e9, "P100": 80e9}
PCIE_BYTES_PER_S = 12e9
#: GPUs that are sold in nodes with a network adapter for every one or two of them.
WELL_CONNECTED = ("A100", "H100", "H200", "B200")
#: GPUs a node, where that is not stated, each as likely as it stands here.
A_NODE = (1, 2, 4, 8, 8, 16)
#: Quantiles: the interval of 80 %, and the middle fifth.
INTERVAL, MIDDLE = (0.1, 0.9), (0.4, 0.6)
DRAWS = 1024
#: Of a draw that counts: all others together move no quantile.
LEAST_WEIGHT = 1e-9


@dataclass(frozen=True)
class Stated:
    """What is stated of a series beside its counts; None and "" where it is not.

    `step_s`: of the smallest count in seconds, if the measured times are in another unit. `servers`:
    whether parameter servers exchange the gradients. `accumulates`: whether a fixed global batch is cut into
    parts that are all reduced, fewer with more workers; None: it may be.
    """

    scaling: Scaling
    gpu: str = ""
    parameters: float | None = None
    per_gpu_batch: float | None = None
    step_s: float | None = None
    servers: bool = False
    accumulates: bool | None = None

    @property
    def link_bytes_per_s(self) -> float:
        return next((v for k, v in LINKS.items() if k in self.gpu.upper()), PCIE_BYTES_PER_S)


@dataclass(frozen=True)
class Interval:
    """`low_s` to `high_s` hold the step's time in 80 of 100 cases; `middle_s` is the projection."""

    low_s: float
    middle_s: float
    high_s: float


def projected(
    points: Sequence[Measured],
    stated: Stated,
    targets: Sequence[tuple[int, int | None]],
    prior: Mapping[str, float] | None = None,
) -> list[Interval]:
    """The step's time at each of `targets` (workers, nodes or None), from counts in ascending order.

    The projection is a + b/N, moved as little as brings it into the middle fifth of what the prior and
    the counts allow. Deterministic: the draws are fixed.
    """
    spread = _spreads(points, stated, targets, prior or PRIOR)
    found = []
    for (workers, _), (centres, sds, weights) in zip(targets, spread, strict=True):
        low, first, last, high = (
            _quantile(centres, sds, weights, p)
            for p in (INTERVAL[0], MIDDLE[0], MIDDLE[1], INTERVAL[1])
        )
        naive_s = a_plus_b_over_n(points, stated.scaling, workers)
        middle = min(max(math.log(naive_s) if naive_s > 0 else -math.inf, first), last)
        found.append(Interval(math.exp(low), math.exp(middle), math.exp(high)))
    return found


def log_density(
    points: Sequence[Measured],
    stated: Stated,
    target: Measured,
    prior: Mapping[str, float],
) -> float:
    """ln of the density that the projection gives to what was measured at `target`; to fit the prior."""
    import numpy as np

    ((centres, sds, weights),) = _spreads(points, stated, [(target.workers, target.nodes)], prior)
    z = (math.log(target.step_s) - centres) / sds
    # A floor, so that no single odd series decides.
    return math.log(float((weights * np.exp(-0.5 * z * z) / sds).sum()) + 1e-3)


def _spreads(
    points: Sequence[Measured],
    stated: Stated,
    targets: Sequence[tuple[int, int | None]],
    prior: Mapping[str, float],
) -> list[tuple[NDArray, NDArray, NDArray]]:
    """For each target the mixture of ln(step's time): a normal for every draw, and the draws' weights."""
    import numpy as np

    if not points:
        raise ValueError("no measured count: nothing to project from")
    drawn = _draws(stated, prior)
    first = points[0].workers
    places = [(p.workers, p.nodes) for p in points] + list(targets)
    if any(nodes is None for _, nodes in places):
        places = [(workers, None) for workers, _ in places]  # one source of the layout, not two
    shapes = [np.log(_relative(drawn, stated.scaling, first, *place)) for place in places]
    n = len(points)
    log_times = np.log([p.step_s for p in points])
    # What the shape misses: noise of each time, and a part that wanders with each doubling.
    doublings = np.log2([workers / first for workers, _ in places])
    wander = math.exp(prior["wander"])
    covariance = np.eye(n) + wander * np.minimum.outer(doublings[:n], doublings[:n])
    inverse = np.linalg.inv(covariance)
    ones = np.ones(n)
    total = ones @ inverse @ ones
    residuals = log_times[:, None] - np.array(shapes[:n])
    level = ones @ inverse @ residuals / total
    residuals = residuals - level
    noise = drawn["noise"]
    log_weights = -0.5 * np.einsum("is,ij,js->s", residuals, inverse, residuals) / noise**2
    log_weights -= (n - 1) * np.log(noise)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    found = []
    for shape, doubling in zip(shapes[n:], doublings[n:], strict=True):
        shared = wander * np.minimum(doublings[:n], doubling)
        centre = shape + level + shared @ inverse @ residuals
        variance = 1 + wander * doubling - shared @ inverse @ shared
        variance += (1 - ones @ inverse @ shared) ** 2 / total
        found.append((centre, noise * math.sqrt(variance), weights))
    return found


def _draws(stated: Stated, prior: Mapping[str, float]) -> dict[str, NDArray]:
    """Draws of what a step loses, in units of the computing of one worker at the smallest count."""
    import numpy as np

    normal, uniform = _fixed_draws()
    extent = (
        abs(prior["all_sd"]) * normal[8]
    )  # of all losses together: some sources have hardly any
    # What takes a fixed time is a larger part of a short step.
    short = -prior["short"] * math.log(stated.step_s) if stated.step_s else 0.0
    connected = prior["connected"] if any(g in stated.gpu.upper() for g in WELL_CONNECTED) else 0.0

    def log_normal(name: str, number: int, by: float = 0.0, sd: str = "") -> NDArray:
        return np.exp(prior[name] + by + abs(prior[sd or f"{name}_sd"]) * normal[number] + extent)

    if stated.parameters and stated.step_s:
        # Gradients of 4 bytes, sent and received once: 8 P / (B t) of the step.
        sent = math.log(8 * stated.parameters / stated.link_bytes_per_s / stated.step_s)
        volume = log_normal("sent", 0, prior["sent_slope"] * sent)
    else:
        volume = log_normal("volume", 0, short)
    kept = abs(prior["kept_sd"]) * normal[3]
    if stated.per_gpu_batch:  # of a batch of `half` half the time would be there without it
        half = np.exp(prior["half"] + abs(prior["half_sd"]) * normal[3])
        fixed = half / (half + stated.per_gpu_batch)
    else:
        fixed = 1 / (1 + np.exp(-(prior["kept"] + kept)))
    batch = math.log(stated.per_gpu_batch / 64) if stated.per_gpu_batch else 0.0
    accumulates = uniform < 1 / (
        1 + math.exp(-(prior["accumulates"] + prior["accumulates_by"] * batch))
    )
    if stated.accumulates is not None:
        accumulates = np.full(DRAWS, stated.accumulates)
    return {
        "volume": volume,
        "between": np.exp(prior["between"] + connected + abs(prior["between_sd"]) * normal[1]),
        "log_n": log_normal("log_n", 2, short),
        "log_nodes": log_normal("log_nodes", 6, short + connected, "log_n_sd"),
        "leaving": log_normal("leaving", 9, short + connected),
        "linear": log_normal("linear", 7, short + prior["servers"] * stated.servers),
        "fixed": fixed,
        "accumulates": accumulates,
        "noise": np.exp(prior["noise"] + abs(prior["noise_sd"]) * normal[5]),
        "a_node": np.array(A_NODE)[
            np.minimum((_node_draws() * len(A_NODE)).astype(int), len(A_NODE) - 1)
        ],
    }


def _relative(
    drawn: Mapping[str, NDArray], scaling: Scaling, first: int, workers: int, nodes: int | None
) -> NDArray:
    """A step's time for each draw. `nodes` None: by the draws' GPUs a node."""
    import numpy as np

    n_nodes = (
        np.ceil(workers / drawn["a_node"]) if nodes is None else float(min(max(nodes, 1), workers))
    )
    a_node = workers / n_nodes
    lost = drawn["volume"] * ((a_node - 1) / a_node + drawn["between"] * (n_nodes - 1) / n_nodes)
    lost = lost + drawn["log_n"] * math.log2(workers) + drawn["log_nodes"] * np.log2(n_nodes)
    lost = lost + drawn["linear"] * (workers - 1) + drawn["leaving"] * (n_nodes > 1)
    if scaling == "weak":
        return 1 + lost
    # A source that accumulates a fixed global batch may reduce with every part: fewer with more workers.
    share = first / workers
    fixed = drawn["fixed"]
    return fixed + (1 - fixed) * share + np.where(drawn["accumulates"], share, 1.0) * lost


@cache
def _all_draws() -> NDArray:
    import numpy as np
    from scipy.stats import qmc

    drawn = qmc.Sobol(12, seed=1).random(DRAWS)
    return np.clip(drawn, 1e-6, 1 - 1e-6).T


@cache
def _fixed_draws() -> tuple[NDArray, NDArray]:
    """Normal numbers of 10 dimensions, and uniform ones."""
    from scipy.special import ndtri

    return ndtri(_all_draws()[:10]), _all_draws()[10]


def _node_draws() -> NDArray:
    return _all_draws()[11]


def _quantile(centres: NDArray, sds: NDArray, weights: NDArray, p: float) -> float:
    """The p-quantile of a mixture of normals, by bisection."""
    from scipy.special import ndtr

    counts = weights > LEAST_WEIGHT
    centres, sds, weights = centres[counts], sds[counts], weights[counts]
    low, high = (centres - 8 * sds).min(), (centres + 8 * sds).max()
    for _ in range(50):
        middle = (low + high) / 2
        if (weights * ndtr((middle - centres) / sds)).sum() < p:
            low = middle
        else:
            high = middle
    return float((low + high) / 2)


#: Means and standard deviations of logarithms. Made by benchmarks/projection_prior.py, which says from what.
PRIOR: dict[str, float] = {
    "volume": -2.403, "volume_sd": 1.182, "sent": 0.603, "sent_sd": 1.48, "sent_slope": 0.705,
    "between": 0.208, "between_sd": 1.194, "connected": -1.294, "log_n": -4.058, "log_n_sd": 1.414,
    "log_nodes": -4.096, "linear": -7.73, "linear_sd": 1.942, "servers": 0.098, "half": 1.595,
    "half_sd": 1.894, "kept": -2.5, "kept_sd": 1.8, "noise": -3.756, "noise_sd": 0.937,
    "wander": -1.304, "all_sd": 1.271, "accumulates": -1.001, "accumulates_by": 0.994, "short": 0.35,
    "leaving": -2.996, "leaving_sd": 1.512,
}  # fmt: skip
