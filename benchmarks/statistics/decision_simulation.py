"""Synthetic studies for the decision's own functions: true times, noise, and what is claimed of them.

Arrays of log times have the shape [studies, models, candidates, repeats]. `decision.py` makes the tables,
tests/core/test_false_decisions.py holds their most telling rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stratbench.analysis.decision import ranking, tolerance
from stratbench.statistics import moderated

MARGIN = 0.03

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(sd: float) -> Draw:
    """Normal noise of log times with one standard deviation."""
    return lambda rng, shape: sd * rng.normal(size=shape)


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Student's t with two degrees of freedom, which has no variance, times 3 %."""
    return 0.03 * rng.standard_t(2, size=shape)


def outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """3 %, and one repeat in ten takes 1.5 to 4 times as long."""
    slow = rng.random(shape) < 0.1
    return 0.03 * rng.normal(size=shape) + slow * np.log(rng.uniform(1.5, 4, shape))


def unequal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Each candidate its own noise, from 0.3 to 10 %, log-uniform."""
    sd = np.exp(rng.uniform(np.log(0.003), np.log(0.1), (*shape[:-1], 1)))
    return sd * rng.normal(size=shape)


def real(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """About 3 %, of servers (the second half) 1.8 times that, each candidate by a factor of its own."""
    sd = 0.03 * np.exp(rng.normal(0, 0.3, (*shape[:-1], 1)))
    sd[:, :, shape[2] // 2 :] *= 1.8
    return sd * rng.normal(size=shape)


NOISES: dict[str, Draw] = {
    "1 %": normal(0.01),
    "3 %": normal(0.03),
    "10 %": normal(0.10),
    "heavy tails (t, 2 degrees)": heavy,
    "10 % outliers, 1.5 to 4 times": outliers,
    "0.3 to 10 % by strategy": unequal,
    "3 %, servers 5.4 %": real,
}


def truths(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """True log times, shape [studies, models, candidates]."""
    behind = {
        "all equal": 0.0,
        "two best equal": rng.uniform(0.05, 0.5, shape),
        "rivals at the margin": np.log1p(MARGIN) + 1e-6,  # the hardest case for an equivalence
    }[kind]
    found = np.zeros(shape) + behind
    found[..., : 2 if kind == "two best equal" else 1] = 0.0
    return found


def ahead_by(share: float, shape: tuple[int, ...]) -> np.ndarray:
    """True log times of which the first is ahead of all others by the share."""
    found = np.full(shape, np.log1p(share))
    found[..., 0] = 0.0
    return found


def judged(
    true: np.ndarray,
    logs: np.ndarray,
    looks: float = 1.0,
    preference: np.ndarray | float = 0.0,
    served: np.ndarray | bool = False,
) -> dict[str, np.ndarray]:
    """What is true of each decision, shape [studies, models].

    `false`: it calls a strategy slower that is not, or something is faster than it says at most;
    `winner`: it names a clear winner; `found`: that is the fastest; `held`: all its intervals hold.
    """
    studies, models, k = true.shape
    means = logs.mean(-1)
    chosen = ranking.find_choice_index(means, preference + np.zeros(true.shape), MARGIN)
    found = ranking.compute_differences_from_choice(logs, chosen)
    flat = (studies, models * k)
    first = (chosen + k * np.arange(models))[..., None] + np.zeros(true.shape, dtype=int)
    variance, dof = (
        part.reshape(true.shape)
        for part in moderated.shrink_variances_by_groups(
            moderated.Differences(*(part.reshape(flat) for part in found)),
            moderated.GroupScatter(
                *(part.reshape(flat) for part in moderated.compute_variances_between_repeats(logs))
            ),
            (served & np.ones(true.shape, dtype=bool)).reshape(flat),
            first.reshape(flat),
        )
    )
    stood = ranking.compare_with_choice(
        found,
        chosen,
        means,
        variance,
        dof,
        moderated.compute_decision_tail_probability(k, looks),
        MARGIN,
    )
    gaps = true - np.take_along_axis(true, chosen[..., None], -1)
    others = np.arange(k) != chosen[..., None]
    winner = (stood.slower | ~others).all(-1)
    return {
        "false": (stood.slower & (gaps <= 1e-12)).any(-1)
        | (-gaps.min(-1) > stood.max_log_lead + 1e-9),
        "winner": winner,
        "found": winner & (gaps.min(-1) >= -1e-12),
        "held": (~others | ((stood.low <= gaps) & (gaps <= stood.high))).all(-1),
    }


def preferences(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray | float, ...]:
    """Orders among equals: none, so that the fastest is chosen, and one that is drawn by lot."""
    lot = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
    return 0.0, lot.astype(float)


def scores_judged(
    true: np.ndarray, scores: np.ndarray, allowed: float = 1.0
) -> dict[str, np.ndarray]:
    """What is true of the judgement of scores, in points: by study, `open` by class but the first.

    `true`: shape [studies, classes], the first is the best; `scores`: with repeats. `excluded`: a class
    that loses no more than is allowed is; `held`: none loses more than it `may`; `open`: a class may
    lose more than is allowed and is not excluded.
    """
    means = scores.mean(-1)
    best = means.argmax(-1)
    widths = tolerance.compute_score_loss_interval_half_widths(scores, best)
    lost = np.take_along_axis(means, best[:, None], -1) - means
    truly = np.take_along_axis(true, best[:, None], -1) - true
    excluded = lost - widths > allowed
    return {
        "excluded": (excluded & (true[:, :1] - true <= allowed)).any(-1),
        "held": (truly <= lost + widths + 1e-9).all(-1),
        "open": ((lost + widths > allowed) & ~excluded)[:, 1:],
    }
