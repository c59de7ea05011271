"""Checks every network of a study in seconds: `snakemake check`, and first of all in `snakemake plan`.

Each is built once and takes a step of every strategy on fake tensors, in the way that the study's cells
will: what a strategy would refuse is told before anything is trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.files import read_json, write_atomic
from stratbench.cell.text.words import counted
from stratbench.plan.footprint.cache import key_parts
from stratbench.plan.footprint.processes import pool_of
from stratbench.plan.footprint.request import Request
from stratbench.plan.needs import Subject, subject_of
from stratbench.strategies import acceptance, strategy_class
from stratbench.study.config.config import Study
from stratbench.telemetry.machine.cores import usable_cores
from stratbench.workload import tasks
from stratbench.workload.network import models
from stratbench.workload.users_code import ModelError, error_text

if TYPE_CHECKING:
    from stratbench.workload.network.trial import Trial

#: The most parameters of a network that is tried with real numbers where fake tensors cannot follow it.
MOST_REAL_PARAMETERS = 50_000_000


@dataclass(frozen=True)
class Network:
    """A network as some of the study's cells train it: what it is, its input and its task."""

    model: str
    own_model: str
    own_task: str
    input_shape: tuple[int, ...]
    classes: int
    values: bool = False

    @classmethod
    def of(cls, r: Request) -> Network:
        s = r.settings
        own = (json.dumps(spec, sort_keys=True) for spec in (s.own_model, s.own_task))
        return cls(s.model, *own, r.input_shape, r.classes, r.values)


@dataclass(frozen=True)
class CheckResult:
    """What the check found of a network, as JSON-able values.

    `error`: why nothing can train it. `unseen`: why fake tensors could not follow it, if so.
    `skipped`: what may get no gradient in a step. `parameters`, `frozen`, `root`: numbers in all, of
    those that are not trained, and of what is in no group. `groups`: (label, parameters).
    `refusals`: for each request, in the order given, why its strategy cannot train it, or None.
    """

    error: str | None = None
    unseen: str | None = None
    parameters: int = 0
    frozen: int = 0
    groups: list[tuple[str, int]] = field(default_factory=list)
    root: int = 0
    rule: str = ""
    batchnorm: bool = False
    dropout: bool = False
    writes_buffers: bool = False
    skipped: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)
    refusals: list[str | None] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Checked:
    """The check of a study. `refused`: why cells cannot be trained."""

    study: str
    subjects: list[Subject]
    found: dict[Network, CheckResult]
    refused: dict[Cell, str]


def check_study(config: Mapping[str, Any], study: Study) -> Checked:
    """Check all networks of a study; prints progress. What had no fault is kept, and not done again."""
    subjects = [subject_of(config, study, cell) for cell in study.cells]
    wanted: dict[Network, list[Request]] = {}
    for s in subjects:
        requests = wanted.setdefault(Network.of(s.request), [])
        if (request := as_checked(s.request)) not in requests:
            requests.append(request)
    found = _find(wanted, Path(config["results"]) / "plan-cache")
    refused = {}
    for s in subjects:
        network = Network.of(s.request)
        why = _refusal_of_cell(s, found[network], wanted[network])
        if why is not None:
            refused[s.cell] = why
    return Checked(study.name, subjects, found, refused)


def as_checked(request: Request) -> Request:
    """The request without what makes no difference here: the samples of an evaluation."""
    return replace(request, eval_batch=2)


def _refusal_of_cell(s: Subject, found: CheckResult, requests: list[Request]) -> str | None:
    if found.error is not None:
        return found.error
    try:
        acceptance.check_batch(
            s.request.network, found.batchnorm, s.samples_per_step, s.settings.accumulate
        )
    except ModelError as error:
        return str(error)
    return found.refusals[requests.index(as_checked(s.request))]


def _find(wanted: Mapping[Network, list[Request]], folder: Path) -> dict[Network, CheckResult]:
    """What is found of each network: kept in `folder` from before, or by processes, one for each core."""
    found: dict[Network, CheckResult] = {}
    paths = {
        network: folder / f"check-{_key(requests)}.json" for network, requests in wanted.items()
    }
    for network, path in paths.items():
        if (kept := _read(path)) is not None:
            found[network] = kept
    missing = {n: requests for n, requests in wanted.items() if n not in found}
    if not missing:
        return found
    kinds = sum(map(len, missing.values()))
    print(
        f"checking {counted(len(missing), 'network')}, {counted(kinds, 'kind')} of cells",
        flush=True,
    )
    with pool_of(min(len(usable_cores()), len(missing))) as pool:
        running = {pool.submit(find, requests): n for n, requests in missing.items()}
        for i, done in enumerate(as_completed(running), 1):
            network = running[done]
            try:
                made = done.result()
            except BrokenProcessPool:
                made = CheckResult(error="the process that checks it was killed (out of memory?)")
            found[network] = made
            print(f"  {network.model}: {made.seconds:.1f} s ({i} of {len(missing)})", flush=True)
            if made.error is None and not any(made.refusals):  # a fault may be mended elsewhere
                text = json.dumps(dataclasses.asdict(made) | {"of": _parts(wanted[network])})
                write_atomic(paths[network], text + "\n")
    return {network: found[network] for network in wanted}


def _parts(requests: Sequence[Request]) -> list[dict[str, object]]:
    return [key_parts(request) for request in requests]


def _key(requests: Sequence[Request]) -> str:
    text = json.dumps(_parts(requests), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path) -> CheckResult | None:
    try:
        kept = read_json(path)
        del kept["of"]
        return CheckResult(**kept)
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- one network ---------------------------------------------------------------------------------


def find(requests: Sequence[Request]) -> CheckResult:
    """What is found of the network that `requests` share. Imports torch, and the user's code."""
    import torch

    started = time.perf_counter()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():  # what a network warns of here says nothing of the study
            warnings.simplefilter("ignore")
            found = _found_of(requests)
    except ModelError as error:
        found = CheckResult(error=str(error))
    except Exception as error:  # whatever a model raises
        found = CheckResult(error=f"{models.in_words(requests[0].network)}: {error_text(error)}")
    return replace(found, seconds=time.perf_counter() - started)


def _found_of(requests: Sequence[Request]) -> CheckResult:
    from stratbench.workload.network.trial import NeedsData

    # What only some of the cells ask of a network is judged with each of these.
    first = min(requests, key=lambda r: r.settings.activation_checkpointing)
    tasks.tried_task(first.settings, first.input_shape, first.classes, first.values)
    try:
        trial, found = _tried(first, on_fakes=True)
        on_fakes = True
    except NeedsData as error:
        parameters = _parameters(first)
        if parameters > MOST_REAL_PARAMETERS:
            raise ModelError(
                f"{error}: it cannot be checked without data, and with {parameters:,} parameters it is too "
                "large to be tried with real numbers here"
            ) from error
        on_fakes = False
        trial, found = _tried(first, on_fakes=False)
        found = replace(found, unseen=f"{error}: it was tried with zeros as its data, on this CPU")
    return replace(found, refusals=[_refusal(r, trial, on_fakes) for r in requests])


def _tried(request: Request, on_fakes: bool) -> tuple[Trial, CheckResult]:
    from stratbench.plan.footprint import fake

    with fake.surroundings(request, on_fakes):
        model, _, worker = fake.built(request, on_fakes)
        groups = worker.wrap_groups
        network, shape = request.network, request.input_shape
        trial = models.trial_of(network, model, request.classes, shape, groups, worker.task)
        names = {module: name for name, module in model.named_modules()}
        sizes = [
            (_span(names[ms[0]], names[ms[-1]]), _numel(p for m in ms for p in m.parameters()))
            for _, ms in groups
        ]
        parameters = _numel(model.parameters())
        return trial, CheckResult(
            parameters=parameters,
            frozen=_numel(p for p in model.parameters() if not p.requires_grad),
            groups=sizes,
            root=parameters - sum(size for _, size in sizes),
            rule=models.sharding_rule(request.network),
            batchnorm=models.has_batchnorm(model),
            dropout=models.has_dropout(model),
            writes_buffers=models.has_batchnorm(model) or bool(trial.written),
            skipped=trial.skipped,
            remarks=list(acceptance.remarks(model, trial)),
        )


def _span(first: str, last: str) -> str:
    """A shard group by its modules, which are neighbours."""
    return first if first == last else f"{first} to {last}"


def _numel(parameters: Any) -> int:
    return sum(p.numel() for p in dict.fromkeys(parameters))


def _parameters(request: Request) -> int:
    model = models.build_without_memory(request.network, request.classes, request.input_shape)
    return _numel(model.parameters())


def _refusal(request: Request, trial: Trial, on_fakes: bool) -> str | None:
    """Why the request's strategy cannot train it: its own rules, or what a step or evaluation raises."""
    from stratbench.plan.footprint import fake
    from stratbench.workload.network.trial import NO_VALUES, SAMPLES

    with ExitStack() as stack:
        try:
            stack.enter_context(strategy_class(request.strategy).on_fakes())
            stack.enter_context(fake.surroundings(request, on_fakes))
            model, strategy, worker = fake.built(request, on_fakes)
            worker.trial = trial
            acceptance.check_model(strategy, request.network, model, worker)
            strategy.setup(model, worker)
            if request.autocasts_like_cuda:
                stack.enter_context(fake.CudaAutocast())
            strategy.step(*fake.batch_of(request, SAMPLES * request.parts))
            fake.evaluate(strategy, request)
        except ModelError as error:
            return str(error)
        except Exception as error:
            who = models.in_words(request.network)
            if isinstance(error, NO_VALUES):
                return (
                    f"{who}: its evaluation asks for the values of tensors, which cannot be checked without "
                    "data"
                )
            return f"{who}: {request.strategy} cannot train it: its step raised {error_text(error)}"
    return None
