"""Whether a strategy can train a network: asked before any training, by jobs and by the check of a study."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stratbench.cell.text.words import names_text
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
    """Refused where the strategy would fail to train `model`, of which `worker.trial` was taken."""
    for reason in strategy.refusals_of_model(model, worker):
        name = worker.settings.strategy
        raise Refused(f"{models.in_words(network)}: {name} cannot train it: {reason}")


#: How far the scores of a divided network may be from the whole one's, relative to the largest of them.
SCORES, ROUNDED_SCORES = 1e-3, 5e-2


@contextmanager
def same_scores(
    strategy: Strategy,
    network: str | models.Model,
    model: nn.Module,
    worker: Worker,
    x: Tensor,
    y: Tensor,
) -> Iterator[None]:
    """Refused where what is set up within gives other scores for `x` than the user's network before.

    Or where a worker would train whole parameters by a part of the positions.

    Asked of strategies that divide a network by what its user states. All workers call it.
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
    with strategy.evaluating() as divided, torch.no_grad():
        actual = divided(x).float()
    bound = SCORES if worker.settings.precision in ("fp32", "fp64") else ROUNDED_SCORES
    if actual.shape == expected.shape:
        error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    else:
        error = torch.full((), torch.inf, device=x.device)
    if not worker.mesh.speaks(worker.rank):
        error.zero_()
    if worker.world_size > 1:
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if not error.item() <= bound:
        raise Refused(
            f"{models.in_words(network)}: divided as its user states, it gives other scores than the whole "
            f"network (by {error.item():.2g} of the largest); correct {strategy.stated_by}"
        )
    if names := strategy.partly_trained(x, y):
        raise Refused(
            f"{models.in_words(network)}: with sequence_parallel: true each worker would train "
            f"{names_text(names)} by "
            "its own positions alone; call the modules that hold them `norm` in tensor_plan"
        )


def check_batch(network: str | models.Model, batchnorm: bool, samples: int, parts: int) -> None:
    """Refused where a worker would normalise over one sample: of `samples` in `parts` parts."""
    if samples < least_samples(batchnorm, parts):
        within = "" if parts == 1 else f" in each of {parts} parts (gradient_accumulation_steps)"
        raise Refused(
            f"{models.in_words(network)}: it normalises over the batch (BatchNorm), and a worker's batch is "
            f"one sample{within}; use a larger batch, or fewer workers"
        )


def least_samples(batchnorm: bool, parts: int) -> int:
    """Samples that a worker must compute on in a step: where it normalises over them, two in each part."""
    return 2 * parts if batchnorm else 1


def moves_by_zeros(strategy: Strategy, trial: Trial, s: Settings) -> bool:
    """Return whether the strategy moves parameters that get no gradient in some steps, and one in others.

    It updates them by a gradient of zeros, which without momentum, decay and moments is no update.
    """
    goes_on = s.momentum or s.weight_decay or s.betas
    return bool(strategy.updates_by_zeros and trial.at_times and goes_on)


def remarks(model: nn.Module, trial: Trial) -> Iterator[str]:
    """What of a network is worth knowing although every strategy trains it."""
    from stratbench.workload.network.trial import tied_parameters
    from stratbench.workload.torch_internals import BatchNorm

    for names in tied_parameters(model):
        yield (
            f"tied: {' = '.join(names)} is one parameter, and stays one with every strategy; what shares it "
            "with a module outside its shard group stays with the root"
        )
    if formats := models.changed_formats(model):
        yield formats
    norms = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, BatchNorm))
    if written := [name for name in trial.written if not name.startswith(norms)]:
        yield f"forward writes the buffers {names_text(written)}"
    if trial.replaced:
        yield (
            f"forward puts new tensors in place of the buffers {names_text(trial.replaced)}: strategies "
            "that send or average buffers go on with the old ones; write them in place (copy_, add_)"
        )
    if trial.overwritten:
        yield (
            f"forward changes the parameters {names_text(trial.overwritten)}: strategies that gather or "
            "pull the weights anew would lose the change, and refuse it"
        )
    if trial.hooked:
        yield (
            f"{names_text(trial.hooked)} has a hook of its gradient: it sees each worker's own gradient, and "
            "with gradient_accumulation_steps each part's, before they are averaged"
        )
    if counted := set(trial.counts + trial.kept_aside).intersection(trial.attributes):
        yield (
            f"forward changes the plain attributes {names_text(sorted(counted))}: the warm-up puts them "
            "back, but no checkpoint has them; a buffer (register_buffer) would be kept"
        )
    if loose := unregistered(model):
        yield (
            f"{names_text(loose)} holds parameters that no module has registered: nothing trains them; use "
            "nn.ParameterList or nn.ParameterDict, or assign them to attributes"
        )


def unregistered(model: nn.Module) -> list[str]:
    """Plain attributes that hold parameters, by themselves or of modules, which the network does not know."""
    from torch import nn

    from stratbench.workload.torch_internals import tree_leaves

    known = set(model.parameters())
    found = []
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            held = [
                p
                for leaf in tree_leaves(value)
                for p in (leaf.parameters() if isinstance(leaf, nn.Module) else [leaf])
                if isinstance(p, nn.Parameter)
            ]
            if not known.issuperset(held):
                found.append(f"{prefix}.{key}" if prefix else key)
    return found
