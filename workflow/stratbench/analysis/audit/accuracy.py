"""Accuracies that say that training did not work, or not as it should."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.analysis.audit.rule import Found, Study, of, rule, without_count

#: Accuracy that any working training reaches within a few epochs, by data set.
ACCURACY_FLOORS = {"digits": 0.70, "mnist": 0.95, "cifar10": 0.40}
ALIKE = 0.01


@rule(
    "accuracy-below-floor",
    "doubtful",
    "accuracy",
    "Working training of any of the models is more accurate on this data set. Look at the learning "
    "rate, BatchNorm statistics that never reach the evaluated model, summed gradients.",
)
def accuracy_below_floor(study: Study) -> Iterator[Found]:
    for row in study.ok.itertuples():
        floor = ACCURACY_FLOORS.get(row.dataset)
        if floor and row.accuracy_final < floor:
            yield Found(of(row), f"{row.accuracy_final:.1%}; working training reaches {floor:.0%}")


@rule(
    "async-alone-unlike-sync",
    "unusable",
    "accuracy",
    "With one worker nothing is ever stale: asynchronous training must equal synchronous training. "
    "The implementations differ in something else.",
)
def async_alone_unlike_sync(study: Study) -> Iterator[Found]:
    for key in study.groups:
        experiment, model, _, gpus = key
        base = str(study.says(key, "strategy_base"))
        if gpus != 1 or not base.startswith("ps-") or base == "ps-sync":
            continue
        sync = (experiment, model, "ps-sync", 1)
        mine, its = (study.median(k, "accuracy_final") for k in (key, sync))
        if mine is not None and its is not None and abs(mine - its) > ALIKE:
            yield Found(
                without_count(key), f"on one worker: accuracy {mine:.1%}, ps-sync {its:.1%}"
            )
