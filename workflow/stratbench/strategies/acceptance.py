"""Checks whether a strategy can train a model, for jobs and the command `check`, before any training."""

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
        name = worker.settings.strategy
        raise Refused(f"{models.describe_model(network)}: {name} cannot train it: {reason}")


#: Largest difference between the scores of a divided model and of the whole model, relative to the largest
#: score: with and without full precision.
SCORES, ROUNDED_SCORES = 1e-3, 5e-2


@contextmanager
def refuse_changed_scores(
    strategy: Strategy,
    network: str | models.Model,
    model: nn.Module,
    worker: Worker,
    x: Tensor,
    y: Tensor,
) -> Iterator[None]:
    """Raise Refused if the strategy's set-up changes the scores of the user's model.

    The set-up is within the block. Refused is also raised if a worker would train whole parameters on some
    positions only. The check is for strategies that divide a model by the user's declarations. All workers
    must call it.

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
    if not worker.mesh.reports_for_replica(worker.rank):
        error.zero_()
    if worker.world_size > 1:
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if not error.item() <= bound:
        raise Refused(
            f"{models.describe_model(network)}: divided as the config states, it gives other scores than "
            f"the whole model (they differ by {error.item():.2g} times the largest score); correct "
            f"{strategy.stated_by}"
        )
    if names := strategy.list_partly_trained_parameters(x, y):
        raise Refused(
            f"{models.describe_model(network)}: with sequence_parallel: true each worker would train "
            f"{format_names(names)} on its own positions alone; give the modules with these parameters the "
            "way `norm` in tensor_plan"
        )


def check_batchnorm_samples(
    network: str | models.Model, batchnorm: bool, samples: int, parts: int
) -> None:
    """Raise Refused if a worker's BatchNorm would normalise over a single sample.

    Args:
        network: Name of the model, or the description of a user's own.
        batchnorm: Whether the model has BatchNorm.
        samples: Samples per step of a worker.
        parts: Number of parts in which the worker computes its samples.
    """
    if samples < compute_min_samples(batchnorm, parts):
        within = "" if parts == 1 else f" in each of {parts} parts (gradient_accumulation_steps)"
        raise Refused(
            f"{models.describe_model(network)}: it normalises over the batch (BatchNorm), but a worker's "
            f"batch has one sample{within}; use a larger batch, or fewer workers"
        )


def compute_min_samples(batchnorm: bool, parts: int) -> int:
    """Return the smallest number of samples per step that a worker can train with.

    The number is two per part with BatchNorm, else one per step.
    """
    return 2 * parts if batchnorm else 1


def updates_parameters_without_gradient(strategy: Strategy, trial: Trial, s: Settings) -> bool:
    """Return whether the strategy changes parameters in steps without a gradient for these parameters.

    Some strategies then use a gradient of zeros, which changes a parameter by momentum, weight decay or
    AdamW's moments.

    Args:
        strategy: The strategy.
        trial: Trial of the model, which finds parameters that get a gradient in some steps only.
        s: Settings of the cell.
    """
    goes_on = s.momentum or s.weight_decay or s.betas
    return bool(strategy.updates_by_zeros and trial.sometimes_without_gradient and goes_on)
