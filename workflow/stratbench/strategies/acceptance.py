"""Checks, before any training, whether a strategy can train a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stratbench.cell.text.words import format_names
from stratbench.workload.network import models
from stratbench.workload.users_code import Refused

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stratbench.cell.settings import Settings
    from stratbench.strategies.base import Strategy, Worker
    from stratbench.workload.network.trial import Trial


def check_model(
    strategy: Strategy,
    network: str | models.Model,
    model: nn.Module,
    worker: Worker,
) -> None:
    """Raise Refused if the strategy cannot train a model.

    Args:
        strategy: The strategy.
        network: Name of the model, or the description of a user's own.
        model: The built model.
        worker: This worker, with a `trial` of the model.
    """
    for reason in strategy.iter_model_refusals(model, worker):
        strategy_name = worker.settings.strategy
        raise Refused(
            f"{models.describe_model(network)}: {strategy_name} cannot train it: {reason}"
        )


#: Limits on how far the scores of a model that is divided among workers may differ from those of the whole
#: model, relative to the largest score. The first is for fp32 and fp64, the second for rounded precisions.
SCORES, ROUNDED_SCORES = 1e-3, 5e-2


@contextmanager
def check_setup_keeps_scores(
    strategy: Strategy,
    network: str | models.Model,
    model: nn.Module,
    worker: Worker,
    x: Tensor,
    y: Tensor,
) -> Iterator[None]:
    """Raise Refused if the strategy's set-up changes the scores of the user's model.

    The caller sets the strategy up within this context. Refused is also raised if a worker would train whole
    parameters on some positions only. The check is for strategies that divide a model by the user's
    declarations. All workers must call it.

    Args:
        strategy: The strategy.
        network: Name of the model, or the description of a user's own.
        model: The built model.
        worker: This worker.
        x: Inputs.
        y: Targets.
    """
    import torch
    import torch.distributed as dist

    if not (strategy.divides_network and worker.settings.own_model):
        yield
        return
    with torch.no_grad():
        expected = model.eval()(x).float()
    model.train()
    yield
    with strategy.open_evaluation_model() as divided, torch.no_grad():
        actual = divided(x).float()
    bound = SCORES if worker.settings.precision in ("fp32", "fp64") else ROUNDED_SCORES
    if actual.shape == expected.shape:
        error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    else:
        error = torch.full((), torch.inf, device=x.device)
    if not worker.mesh.reports_replica_results(worker.rank):
        error.zero_()
    if worker.world_size > 1:
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if not error.item() <= bound:
        raise Refused(
            f"{models.describe_model(network)}: divided among workers as the config states, it gives "
            f"other scores than the whole model (the difference is {error.item():.2g} times the largest "
            f"score); correct {strategy.stated_by}"
        )
    if names := strategy.list_parameters_with_partial_gradient(x, y):
        raise Refused(
            f"{models.describe_model(network)}: with sequence_parallel: true each worker would train "
            f"the parameters {format_names(names)} on its own positions only; in tensor_plan, give the "
            "modules with these parameters the value `norm`"
        )


def check_batchnorm_samples(
    network: str | models.Model, has_batchnorm: bool, worker_samples: int, batch_parts: int
) -> None:
    """Raise Refused if a worker's BatchNorm would normalise over a single sample.

    Args:
        network: Name of the model, or the description of a user's own.
        has_batchnorm: Whether the model has BatchNorm.
        worker_samples: Number of samples that a worker computes in a step.
        batch_parts: Number of parts into which the worker divides these samples.
    """
    if worker_samples < compute_min_samples_per_step(has_batchnorm, batch_parts):
        in_each_part = (
            ""
            if batch_parts == 1
            else f" in each of {batch_parts} parts (gradient_accumulation_steps)"
        )
        raise Refused(
            f"{models.describe_model(network)}: BatchNorm normalises over a worker's batch, which has only "
            f"one sample{in_each_part}; use a larger batch, or fewer workers"
        )


def compute_min_samples_per_step(has_batchnorm: bool, batch_parts: int) -> int:
    """Return the smallest number of samples with which a worker can train a step.

    With BatchNorm, the number is two per part of the batch. Otherwise, it is one per step.
    """
    return 2 * batch_parts if has_batchnorm else 1


def updates_parameters_without_gradient(strategy: Strategy, trial: Trial, s: Settings) -> bool:
    """Return whether the strategy changes a parameter in steps in which it has no gradient.

    Some strategies use a gradient of zeros for such a parameter. Momentum, weight decay or AdamW's moments
    then change it.

    Args:
        strategy: The strategy.
        trial: Trial of the model, which finds parameters that get a gradient in some steps only.
        s: Settings of the cell.
    """
    changes_by_zeros = s.momentum or s.weight_decay or s.betas
    return bool(
        strategy.updates_by_zeros
        and trial.names_without_gradient_in_some_steps
        and changes_by_zeros
    )
