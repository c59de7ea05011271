"""Checks every model of a study, for `snakemake check` and before `snakemake plan`.

Each model is tried as in a job. Every strategy takes steps with it on fake tensors, as the study's cells
will. Unsupported models are reported before any training, and the steps give the footprints for the plan. A
limitation of fake tensors does not count as a fault of a model.
"""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.cell.coordinates import Cell
from stratbench.extensions.plan.footprint.cache import CachedJob, compute_cached_results
from stratbench.extensions.plan.footprint.few_parts import make_footprint_from_few_parts
from stratbench.extensions.plan.footprint.footprint import Footprint
from stratbench.extensions.plan.footprint.request import RESHARDING, Request
from stratbench.extensions.plan.needs import CellToPlan, make_cell_to_plan
from stratbench.strategies import acceptance, get_strategy_class
from stratbench.study.config.config import Study
from stratbench.workload.network import models
from stratbench.workload.network.libraries import find_library_of_call
from stratbench.workload.task_trial import NO_SUM
from stratbench.workload.users_code import ModelError, format_user_error

if TYPE_CHECKING:
    from stratbench.workload.network.trial import Trial

#: Path of the container of equal blocks, and their number, as in `Blocks`.
PathAndCount = tuple[str, int]
#: Maximum number of parameters of a user's model that the check runs with real tensors, as jobs do.
MAX_REAL_PARAMETERS = 50_000_000
#: Reason why the plan does not predict the memory of a user's command.
BY_COMMAND = (
    "memory and traffic of a command are unknown until it has run; its time follows from records"
)
#: Reason why the plan does not predict the memory of a model whose forward reads values of tensors.
NO_PREDICTION = "its forward reads values of tensors, and a prediction has none"


@dataclass(frozen=True)
class Network:
    """A model of the study, with its input and its task."""

    model: str
    own_model_json: str
    own_task_json: str
    task: str | None
    input_shape: tuple[int, ...]
    classes: int
    values: bool = False

    @classmethod
    def from_request(cls, request: Request) -> Network:
        s = request.settings
        own = (json.dumps(spec, sort_keys=True) for spec in (s.own_model, s.own_task))
        return cls(s.model, *own, s.task, request.input_shape, request.classes, request.values)


@dataclass(frozen=True)
class CheckResult:
    """Result of the check of a model, with values that JSON can store.

    Attributes:
        fault: Why no strategy can train the model, or None.
        unchecked_reason: Why the model could not be tried here, or None.
        unpredicted_reason: Why none of the model's cells has a footprint, or None.
        num_parameters: Number of parameters.
        num_frozen_parameters: Number of parameters that are not trained.
        shard_groups: Label and number of parameters of each shard group.
        num_root_parameters: Number of parameters outside of all shard groups.
        wrap_rule: Text on the rule that made the groups.
        parameters_without_gradient: Names of parameters that may get no gradient in a step.
        trial_values: Result of trial steps (`Trial`).
        equal_blocks: Path and number of equal blocks that the model calls in turn, or None.
        seconds: Time that the check took.
    """

    fault: str | None = None
    unchecked_reason: str | None = None
    unpredicted_reason: str | None = None
    num_parameters: int = 0
    num_frozen_parameters: int = 0
    shard_groups: list[tuple[str, int]] = field(default_factory=list)
    num_root_parameters: int = 0
    wrap_rule: str = ""
    has_batchnorm: bool = False
    has_dropout: bool = False
    writes_buffers: bool = False
    parameters_without_gradient: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)
    trial_values: dict[str, Any] = field(default_factory=dict)
    equal_blocks: PathAndCount | None = None
    seconds: float = 0.0

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CheckResult:
        return cls(**fields)

    @classmethod
    def failed(cls, reason: str) -> CheckResult:
        return cls(fault=reason)


@dataclass(frozen=True)
class DryRun:
    """Result of a strategy's dry run with a model on fake tensors.

    Attributes:
        footprint: The footprint, if the run succeeded.
        refusal_reason: Why the strategy cannot train the model, or None.
        unpredicted_reason: Why there is no footprint although the model is supported, or None.
        unchecked_reason: Why no step could be tried, or None.
    """

    footprint: Footprint | None = None
    refusal_reason: str | None = None
    unpredicted_reason: str | None = None
    unchecked_reason: str | None = None

    @property
    def fault(self) -> str | None:
        return self.refusal_reason or (
            self.unpredicted_reason if self.unpredicted_reason != NO_PREDICTION else None
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DryRun:
        made = fields["footprint"]
        return cls(**fields | {"footprint": made and Footprint.from_dict(made)})

    @classmethod
    def failed(cls, reason: str) -> DryRun:
        return cls(unpredicted_reason=reason)


@dataclass(frozen=True)
class StudyCheck:
    """Result of the check of a study: models, dry runs and footprints.

    Attributes:
        cells_to_plan: The cells of the study.
        checks_by_network: Check of each model.
        dry_runs_by_request: Dry run of each kind of cell.
        refusal_reasons_by_cell: Why a cell cannot be trained, by cell.
        footprints_by_request_and_resharding: Footprints by value of `reshard_after_forward`, for kinds of
            cells that were tried with both.
    """

    study: Study
    cells_to_plan: list[CellToPlan]
    checks_by_network: dict[Network, CheckResult]
    dry_runs_by_request: dict[Request, DryRun]
    refusal_reasons_by_cell: dict[Cell, str]
    footprints_by_request_and_resharding: dict[Request, dict[str, Footprint]]


def check_study(
    config: Mapping[str, Any], study: Study, tries_both_resharding: bool = False
) -> StudyCheck:
    """Check all models of a study, and make the footprints of its cells.

    Print progress. Results without a fault are cached.

    Args:
        config: The validated config.
        study: The study.
        tries_both_resharding: Whether FSDP's cells on the largest number of workers are tried with both
            values of `reshard_after_forward`.
    """
    subjects = [make_cell_to_plan(config, study, cell) for cell in study.cells]
    requests = [s.request for s in subjects]
    max_gpus = {
        name: max(e.expand_cells_arguments["gpus"]) for name, e in study.experiments.items()
    }
    others = {
        s.cell: flip_reshard_after_forward(s.request)
        for s in subjects
        if RESHARDING in s.request.options and s.cell.gpus == max_gpus[s.cell.experiment]
    }
    if tries_both_resharding:
        requests += others.values()
    networks, dry_runs = dry_run_requests(requests, Path(config["results"]) / "plan-cache")
    refused = {
        s.cell: reason
        for s in subjects
        if (
            reason := find_cell_refusal_reason(
                s, networks[Network.from_request(s.request)], dry_runs[s.request]
            )
        )
    }
    both = {
        s.request: {
            r.options[RESHARDING]: dry_runs[r].footprint for r in (s.request, others[s.cell])
        }
        for s in subjects
        if s.cell not in refused and others.get(s.cell) in dry_runs
    }
    known = {request: choices for request, choices in both.items() if all(choices.values())}
    return StudyCheck(study, subjects, networks, dry_runs, refused, known)


def flip_reshard_after_forward(request: Request) -> Request:
    """Return a request that differs in `reshard_after_forward`: never for always, or reversed."""
    other = {"always": "never", "never": "always"}[request.options[RESHARDING]]
    return request.with_options(**{RESHARDING: other})


def find_cell_refusal_reason(
    subject: CellToPlan, network_check: CheckResult, dry_run: DryRun
) -> str | None:
    """Return why a cell cannot be trained with its model, batch and strategy, or None.

    Args:
        subject: The cell.
        network_check: Check of the cell's model.
        dry_run: Dry run of the cell's strategy.
    """
    if network_check.fault is not None:
        return network_check.fault
    try:
        acceptance.check_batchnorm_samples(
            subject.request.model_source,
            network_check.has_batchnorm,
            subject.samples_per_step,
            subject.settings.gradient_accumulation_steps,
        )
    except ModelError as error:
        return str(error)
    return dry_run.refusal_reason


def dry_run_requests(
    requests: Iterable[Request], folder: Path
) -> tuple[dict[Network, CheckResult], dict[Request, DryRun]]:
    """Return the checks of the requests' models, and the dry runs of their strategies.

    Results are read from the cache if possible.
    """
    network_by_request = {request: Network.from_request(request) for request in requests}
    networks = check_neural_networks(network_by_request, folder)
    jobs = {
        request: CachedJob(
            f"{network.model} with {request.strategy}",
            (request, networks[network]),
            {"dry_run": dataclasses.asdict(request)},
            # Expected duration: a dry run takes longer if the model is sharded.
            networks[network].seconds * (2 if request.traits.shards_states else 1),
        )
        for request, network in network_by_request.items()
        if networks[network].fault is None and networks[network].unchecked_reason is None
        if not request.is_trained_by_command
    }
    dry_runs = compute_cached_results(
        "kinds of cells to trace: {}; results are cached for the next run",
        DryRun,
        dry_run_strategy,
        jobs,
        folder,
    )
    unchecked_reasons = {r: networks[n].unchecked_reason for r, n in network_by_request.items()}
    without_run = {
        r: DryRun(unpredicted_reason=BY_COMMAND)
        if r.is_trained_by_command
        else DryRun(unpredicted_reason=reason, unchecked_reason=reason)
        for r, reason in unchecked_reasons.items()
    }
    return networks, without_run | dry_runs


def check_neural_networks(requests: Iterable[Request], folder: Path) -> dict[Network, CheckResult]:
    """Return the checks of the models of `requests`, cached in `folder` or run in processes."""
    sharing: dict[Network, list[Request]] = {}
    for request in dict.fromkeys(requests):
        sharing.setdefault(Network.from_request(request), []).append(request)
    # Each network is checked with one of its requests, if possible one with neither a command nor activation
    # checkpointing. Dry runs of other requests check their additional requirements.
    firsts = {
        n: min(
            each, key=lambda r: (r.is_trained_by_command, bool(r.settings.activation_checkpointing))
        )
        for n, each in sharing.items()
    }
    own = (r.settings.own_model for r in firsts.values())
    builders = {find_library_of_call(spec["call"]).built_by for spec in own if spec}
    return compute_cached_results(
        "models to check: {}",
        CheckResult,
        check_neural_network,
        {
            n: CachedJob(n.model, (r,), {"network": dataclasses.asdict(r)})
            for n, r in firsts.items()
        },
        folder,
        preloaded_modules=sorted(filter(None, builders)),
    )


# --- check of one model ------------------------------------------------------------------------


def check_neural_network(request: Request) -> CheckResult:
    """Check the model of a request. The check imports torch, and the user's code."""
    import torch

    started = time.perf_counter()
    torch.set_num_threads(1)
    try:
        # Warnings of the model's code during the check are not shown.
        with warnings.catch_warnings(action="ignore"):
            result = _check_task_and_model(request)
    except ModelError as error:
        result = CheckResult(fault=str(error))
    except Exception as error:  # a model may raise anything
        result = CheckResult(
            fault=f"{models.describe_model(request.model_source)}: {format_user_error(error)}"
        )
    return replace(result, seconds=time.perf_counter() - started)


def _check_task_and_model(request: Request) -> CheckResult:
    _, kind = request.make_task_and_loss_kind()
    result = _check_model(request)
    return result if kind.adds_up else replace(result, remarks=[*result.remarks, NO_SUM])


def _check_model(request: Request) -> CheckResult:
    from stratbench.workload.network.trial import NO_VALUES, PassFailed

    if models.is_built_by_user_program(request.model_source):
        return CheckResult(
            unchecked_reason="config.yaml only names it, and the command that trains it builds it"
        )
    parameters = _count_model_parameters(request)
    if (
        models.get_model_metadata(request.model_source).own_model
        and parameters <= MAX_REAL_PARAMETERS
    ):
        result = _run_model_trial(request, on_fake_tensors=False)
        # If forward reads values of tensors, a trial on fake tensors shows whether any cell of the model can
        # be predicted.
        if result.trial_values["forward_reads_values"]:
            try:
                _run_model_trial(request, on_fake_tensors=True)
            except PassFailed as error:
                if isinstance(error.__cause__, NO_VALUES):
                    return replace(result, unpredicted_reason=NO_PREDICTION)
        return result
    try:
        return _run_model_trial(request, on_fake_tensors=True)
    except PassFailed as error:
        return CheckResult(
            unchecked_reason=f"{error}: it was tried on tensors without values, which may be the cause; with "
            f"{parameters:,} parameters it is too large to be tried with real numbers here",
            num_parameters=parameters,
        )


def _run_model_trial(request: Request, on_fake_tensors: bool) -> CheckResult:
    from stratbench.extensions.plan.footprint import fake
    from stratbench.extensions.plan.remarks import iter_model_remarks

    with fake.open_fake_worker_environment(request, on_fake_tensors):
        model, _, worker = fake.build_model_strategy_and_worker(request, on_fake_tensors)
        groups = worker.wrap_groups
        network, shape = request.model_source, request.input_shape
        trial = models.run_model_trial(
            network, model, request.classes, shape, groups, worker.task, request.dtype
        )
        names = {module: name for name, module in model.named_modules()}
        sizes = [
            (
                _describe_shard_group(names[ms[0]], names[ms[-1]]),
                _count_elements(p for m in ms for p in m.parameters()),
            )
            for _, ms in groups
        ]
        parameters = _count_elements(model.parameters())
        return CheckResult(
            num_parameters=parameters,
            num_frozen_parameters=_count_elements(
                p for p in model.parameters() if not p.requires_grad
            ),
            shard_groups=sizes,
            num_root_parameters=parameters - sum(size for _, size in sizes),
            wrap_rule=models.describe_sharding_rule(request.model_source, model),
            has_batchnorm=models.has_batchnorm(model),
            has_dropout=trial.forward_draws_random_numbers,
            writes_buffers=models.has_batchnorm(model) or bool(trial.written_buffers),
            parameters_without_gradient=trial.names_skipped_in_some_steps,
            remarks=list(iter_model_remarks(model, trial)),
            trial_values=dataclasses.asdict(trial),
            equal_blocks=find_equal_blocks(request, model),
        )


def find_equal_blocks(request: Request, model: Any) -> PathAndCount | None:
    """Return the path and number of a model's equal blocks, or None.

    Forward must call each block once, in order, with equal operations.
    """
    from stratbench.extensions.plan.footprint.equal_blocks import (
        are_blocks_called_alike,
        find_largest_equal_blocks,
    )
    from stratbench.workload.network.trial import SAMPLES

    blocks = find_largest_equal_blocks(model)
    if blocks is None:
        return None
    x, _ = request.make_example_batch(SAMPLES)
    return tuple(blocks) if are_blocks_called_alike(model, blocks, x) else None


def _describe_shard_group(first_module: str, last_module: str) -> str:
    """Return the label of a shard group: the names of its first and last module."""
    return first_module if first_module == last_module else f"{first_module} to {last_module}"


def _count_elements(parameters: Any) -> int:
    return sum(p.numel() for p in dict.fromkeys(parameters))


def _count_model_parameters(request: Request) -> int:
    from stratbench.workload.known_values import KnownValueFakeMode

    with KnownValueFakeMode():
        model = models.build_fake_model(request.model_source, request.classes, request.input_shape)
    return _count_elements(model.parameters())


# --- dry run of one kind of cell --------------------------------------------------------------


def dry_run_strategy(request: Request, network_check: CheckResult) -> DryRun:
    """Run a request's strategy with its model on fake tensors, and return the result.

    `network_check` is the check of the model.
    """
    import torch

    from stratbench.workload.network.trial import Trial

    torch.set_num_threads(1)
    trial = Trial.from_dict(network_check.trial_values)
    with warnings.catch_warnings(action="ignore"):
        made = network_check.unpredicted_reason or make_footprint_or_error(
            request, trial, network_check.equal_blocks
        )
        if isinstance(made, Footprint):
            return DryRun(made)
        # Fake tensors may have caused the error. If the model is small, a step with real numbers shows
        # whether they did.
        if network_check.num_parameters <= MAX_REAL_PARAMETERS:
            return DryRun(
                refusal_reason=_find_strategy_refusal_reason(request, trial),
                unpredicted_reason=made,
            )
        if refusal := _find_strategy_refusal_reason(request, trial, only_by_rules=True):
            return DryRun(refusal_reason=refusal, unpredicted_reason=made)
        return DryRun(unpredicted_reason=made, unchecked_reason=made)


def make_footprint_or_error(
    request: Request, trial: Trial | None = None, blocks: PathAndCount | None = None
) -> Footprint | str:
    """Return a request's footprint, or a one-line error if the trace fails.

    Args:
        request: The request.
        trial: Trial of the request's model.
        blocks: Path and number of equal blocks, if any.
    """
    from stratbench.extensions.plan.footprint.equal_blocks import Blocks
    from stratbench.workload.network.trial import NO_VALUES

    try:
        return make_footprint_from_few_parts(request, trial, blocks and Blocks(*blocks))
    except ModelError as error:  # its message says what is wrong
        return str(error)
    except NO_VALUES:
        return NO_PREDICTION
    except Exception as error:  # a model or strategy may raise anything
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _find_strategy_refusal_reason(
    request: Request, trial: Trial, only_by_rules: bool = False
) -> str | None:
    """Return why the strategy's rules or a trial step refuse the model, or None.

    Args:
        request: The request.
        trial: Trial of the request's model.
        only_by_rules: Check the rules only: no step is taken, and no tensor is real.
    """
    from stratbench.extensions.plan.footprint import fake
    from stratbench.workload.network.trial import SAMPLES

    with ExitStack() as stack:
        try:
            stack.enter_context(get_strategy_class(request.strategy).support_fake_tensors())
            stack.enter_context(fake.open_fake_worker_environment(request, only_by_rules))
            model, strategy, worker = fake.build_model_strategy_and_worker(
                request, only_by_rules, trial=trial
            )
            if only_by_rules:
                return None
            strategy.setup(model, worker)
            if request.autocasts_like_cuda:
                stack.enter_context(fake.emulate_cuda_autocast())
            strategy.step(*request.make_example_batch(SAMPLES * request.num_accumulated_parts))
            fake.evaluate_on_fake_tensors(strategy, request)
        except ModelError as error:
            return str(error)
        except Exception as error:
            if only_by_rules:
                return None
            label = models.describe_model(request.model_source)
            return f"{label}: {request.strategy} cannot train it: its step raised {format_user_error(error)}"
    return None
