"""How often the decision claims what is not so, simulated through its own functions.

`python -m pytest -q -s tests/unit/test_false_decisions.py` prints the rates that docs/decision.md
states. The candidates of a simulated study's one or three models share one kind of noise; a
decision is false when it calls a strategy clearly slower that is not slower, or when something is faster than
the chosen one by more than it says at most.
"""

from __future__ import annotations

import numpy as np
import pytest

from stratbench import moderated
from stratbench.analysis import ranking

STUDIES = 500
MARGIN = 0.03
#: Standard deviation of the logarithm of a training time in separate jobs; servers scatter more.
SD, SERVERS = 0.03, 1.8


def truths(kind: str, models: int, candidates: int, rng: np.random.Generator) -> np.ndarray:
    """True logarithms of the times, shape [studies, models, candidates]."""
    shape = (STUDIES, models, candidates)
    if kind == "all equal":
        return np.zeros(shape)
    if kind == "two best equal":
        later = rng.uniform(0.05, 0.5, shape)
        later[..., :2] = 0.0
        return later
    if kind == "a winner by 20 %":
        ahead = np.full(shape, np.log(1.2))
        ahead[..., 0] = 0.0
        return ahead
    if kind == "rivals at the margin":  # the hardest case for an equivalence
        at = np.full(shape, np.log1p(MARGIN) + 1e-6)
        at[..., 0] = 0.0
        return at
    raise ValueError(kind)


def noise(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Of log times, shape [studies, models, candidates, repeats]; each candidate scatters its own way."""
    sd = SD * np.exp(rng.normal(0, 0.3, (*shape[:-1], 1)))
    sd[:, :, shape[2] // 2 :] *= SERVERS
    drawn = sd * rng.normal(size=shape)
    if kind == "contaminated":  # one repeat in twenty is 10 to 40 % slow
        drawn += (rng.random(shape) < 0.05) * rng.uniform(0.1, 0.4, shape)
    return drawn


def simulated(
    candidates: int, repeats: int, how: str, kind: str, models: int = 3
) -> dict[str, float]:
    """Rates, in percent, over all decisions of one case."""
    rng = np.random.default_rng([models, candidates, repeats])
    true = truths(kind, models, candidates, rng)
    logs = true[..., None] + noise(how, (*true.shape, repeats), rng)
    preference = rng.permuted(np.broadcast_to(np.arange(candidates) // 2, true.shape), axis=-1)
    found = judged(true, logs, preference)
    return {name: 100 * float(rate.mean()) for name, rate in found.items()}


def judged(true: np.ndarray, logs: np.ndarray, preference: np.ndarray) -> dict[str, np.ndarray]:
    """Of each decision, shape [studies, models]: whether it is false, clear, and all intervals hold."""
    candidates = true.shape[-1]
    means = logs.mean(-1)
    chosen = ranking.index_of_choice(means, preference.astype(float), MARGIN)
    found = ranking.differences_from_chosen(logs, chosen)
    served = np.arange(candidates) >= candidates // 2
    served = served | np.take_along_axis(np.broadcast_to(served, true.shape), chosen[..., None], -1)
    # A study's models are moderated together.
    joined = moderated.Differences(*(part.reshape(STUDIES, -1) for part in found))
    variance, dof = (
        part.reshape(true.shape)
        for part in moderated.moderated_variances(joined, served.reshape(STUDIES, -1))
    )
    stood = ranking.standings_against_chosen(
        found, chosen, means, variance, dof, candidates - 1, MARGIN
    )
    gaps = true - np.take_along_axis(true, chosen[..., None], -1)
    others = np.arange(candidates) != chosen[..., None]
    false_slower = (stood.slower & (gaps <= 1e-12)).any(-1)
    return {
        "false": false_slower | (-gaps.min(-1) > stood.at_most + 1e-9),
        "clear": (stood.slower | ~others).all(-1),
        "covered": (~others | ((stood.low <= gaps) & (gaps <= stood.high))).all(-1),
    }


@pytest.mark.parametrize(("divisor", "most"), [(4.5, 5), (0.5, 100)])
def test_looking_again_after_more_repeats_finds_no_winner_where_there_is_none(
    monkeypatch, divisor, most
):
    """A decision after each of 2 to 10 repeats of equals: whether any look names a winner."""
    monkeypatch.setattr(moderated, "REPEATED_LOOKS", divisor)
    rates: dict[tuple[str, str], list[float]] = {}
    for kind in ("two best equal", "all equal"):
        for candidates in (3, 8):
            rng = np.random.default_rng([7, candidates])
            true = truths(kind, 3, candidates, rng)
            logs = true[..., None] + noise("normal", (*true.shape, 10), rng)
            preference = np.broadcast_to(np.arange(candidates) // 2, true.shape)
            looks = [judged(true, logs[..., :n], preference) for n in (2, 3, 4, 5, 6, 8, 10)]
            for name in ("clear", "false"):
                at_any = np.logical_or.reduce([look[name] for look in looks])
                rates.setdefault((kind, name), []).append(100 * float(at_any.mean()))
    for (kind, name), (few, many) in rates.items():
        what = "a winner that is none" if name == "clear" else "anything false"
        print(f"\nseven looks, divisor {divisor:g}, {kind}: {what}", end=" ")
        print(f"in {few:.1f} % with 2 rivals, in {many:.1f} % with 7")
    winners = max(max(found) for (_, name), found in rates.items() if name == "clear")
    assert winners <= most
    assert most < 100 or winners > 5


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("how", ["normal", "contaminated"])
@pytest.mark.parametrize("kind", ["all equal", "two best equal", "rivals at the margin"])
def test_few_decisions_are_false(how, kind, models):
    worst = {"false": 0.0, "clear": 0.0, "covered": 100.0}
    for repeats in (3, 5, 10):
        for rivals in range(2, 8):
            rates = simulated(rivals + 1, repeats, how, kind, models)
            worst["false"] = max(worst["false"], rates["false"])
            worst["clear"] = max(worst["clear"], rates["clear"])
            worst["covered"] = min(worst["covered"], rates["covered"])
    print(
        f"\n{models} model(s), {how} noise, {kind}: at most {worst['false']:.1f} % false, "
        f"at most {worst['clear']:.1f} % with a clear winner, "
        f"all intervals of a decision hold in at least {worst['covered']:.1f} %"
    )
    assert worst["false"] <= 5
    assert worst["covered"] >= 94
    if kind != "rivals at the margin":
        assert worst["clear"] <= 5  # there is none


@pytest.mark.parametrize("repeats", [3, 5])
def test_an_uncorrected_interval_would_decide_falsely(monkeypatch, repeats):
    """The control: the simulation finds the error that the correction is there for."""
    monkeypatch.setattr(moderated, "tail_of", lambda rivals: 0.05)
    assert simulated(8, repeats, "normal", "all equal")["false"] > 5


@pytest.mark.parametrize(("repeats", "least"), [(3, 25), (5, 80), (10, 97)])
def test_what_is_much_slower_is_told_apart(repeats, least):
    """The price: how often a winner by 20 % is found among eight."""
    found = simulated(8, repeats, "normal", "a winner by 20 %")
    print(f"\na winner by 20 % of 8, {repeats} repeats: found in {found['clear']:.0f} %")
    assert found["clear"] >= least
    assert found["false"] <= 5
