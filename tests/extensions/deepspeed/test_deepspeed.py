"""DeepSpeed's engine trains as DDP does, in fp32; is planned as it runs; and is asked for before any job.

`make test-deepspeed` runs all of it. Without DeepSpeed what needs it is skipped, and the reason says how to
install it.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import yaml
from process_groups import found_by_groups
from test_plan_footprint import request_for as footprint_request
from test_weighed import PADDING, Ignoring
from torch import Tensor, nn

import invariants
from launching import ADAMW, settings
from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.audit.audit import RULES, run_rule
from stratbench.extensions.audit.rule import AuditData
from stratbench.extensions.deepspeed.strategy import DeepSpeed
from stratbench.extensions.plan import check
from stratbench.extensions.plan.footprint import fake, footprint
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.footprint.trace import OperatorTrace
from stratbench.extensions.plan.footprint.traffic import compute_wire_bytes
from stratbench.strategies import get_option_defaults, needs
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.strategies.ddp import DDP
from stratbench.study.config.config import Study
from stratbench.study.config.messages import ConfigError
from stratbench.study.config.validation import validate_config
from stratbench.workload import tasks
from stratbench.workload.network import models
from stratbench.workload.network.gpt import GPT, Block
from stratbench.workload.network.trial import run_trial_steps

ROOT = Path(__file__).parents[3]
#: Why what needs DeepSpeed is skipped; empty: it is here.
LACKING = " ".join(needs.iter_missing_requirements([("deepspeed", DeepSpeed, {})]))
with_deepspeed = pytest.mark.skipif(bool(LACKING), reason=LACKING)
slow = [pytest.mark.slow, pytest.mark.timeout(480), with_deepspeed]

CPU = torch.device("cpu")
STEPS, BATCH, VOCABULARY, POSITIONS, CLASSES = 6, 8, 7, 8, 3
#: How far losses and weights may be from DDP's where they are not equal bit for bit: other orders of sums.
NEAR = 2e-5
#: Ways to train: settings, and whether stages 1 and 2 on one and two workers do the same sums as DDP.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "schedule": ({"schedule": "cosine", "lr_warmup_steps": 2}, True),
    "adamw": (ADAMW, False),
    "parts": ({"gradient_accumulation_steps": 2}, False),
    "clip": ({"max_grad_norm": 0.2}, False),
    "bf16": ({"precision": "bf16"}, True),
}
STAGES = (1, 2, 3)


def request_for(stage: int, model: str, workers: int) -> Request:
    return footprint_request("deepspeed", model, workers, options={"stage": stage})


# ---------------------------------------------------------------- what the processes run


class Alone(DeepSpeed):
    """A mutant: gradients stay each worker's own."""

    def backward(self, loss: Tensor) -> None:
        from deepspeed import comm

        reduce, comm.all_reduce = comm.all_reduce, lambda *_, **__: None
        try:
            super().backward(loss)
        finally:
            comm.all_reduce = reduce


class Added(DeepSpeed):
    """A mutant: the gradients of a batch's parts are added, not averaged."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.worker.settings.gradient_accumulation_steps)


class Unclipped(DeepSpeed):
    """A mutant: nobody clips."""

    def make_cell_engine_config(self, worker: Worker) -> dict[str, Any]:
        return super().make_cell_engine_config(worker) | {"gradient_clipping": 0.0}


class Constant(DeepSpeed):
    """A mutant: the engine does not see the schedule."""

    def prepare_update(self) -> None: ...


class WarmedUp(DeepSpeed):
    """A mutant: the master copy, from which weights are updated, stays as the warm-up has left it."""

    def weights_and_buffers(self) -> list[Tensor]:
        return super().weights_and_buffers()[len(self.local) :]


MUTANTS: dict[str, tuple[type[DeepSpeed], str]] = {
    "alone": (Alone, "plain"),
    "added": (Added, "parts"),
    "unclipped": (Unclipped, "clip"),
    "constant": (Constant, "schedule"),
    "warmed-up": (WarmedUp, "plain"),
}


def network(kind: str) -> nn.Module:
    """Two, neither of which any number of workers divides evenly; the text's head is its embedding."""
    torch.manual_seed(0)
    if kind in ("text", "padded"):
        return GPT(VOCABULARY, POSITIONS, layers=2, heads=2, width=6)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.BatchNorm2d(5) if kind == "batchnorm" else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(180, 13),
        nn.ReLU(),
        nn.Linear(13, CLASSES),
    )


def samples(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind in ("text", "padded"):
        text = torch.randint(VOCABULARY, (2 * STEPS * BATCH, POSITIONS + 1), generator=generator)
        if kind == "padded":
            text[: len(text) // 3, 2:] = PADDING
        return text[:, :-1], text[:, 1:]
    y = torch.randint(CLASSES, (2 * STEPS * BATCH,), generator=generator)
    noise = torch.randn(len(y), 1, 6, 6, generator=generator)
    return noise + (y.float() - 1).view(-1, 1, 1, 1), y


def set_up(
    cls: type[Collective], options: dict[str, Any], kind: str, rank: int, world: int, **changed: Any
) -> Collective:
    strategy = cls(cls.Options(**options))
    s = replace(
        settings("deepspeed", gpus=world), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True,
        global_batch=BATCH, per_worker_batch=BATCH // world,
    )  # fmt: skip
    model = network(kind)
    wrapped = (Block, nn.Linear, nn.Conv2d) if not isinstance(model, GPT) else (Block,)
    groups = [(name, [m]) for name, m in model.named_modules() if isinstance(m, wrapped)]
    of_kind = {"text": tasks.NextToken, "padded": Ignoring}
    task = of_kind.get(kind, tasks.Classification)()
    strategy.setup(
        model,
        Worker(
            replace(s, **changed), rank, world, world, torch.device("cpu"), RunFolder(Path()), groups,
            task=task, has_weighted_loss=kind == "padded", total_steps=2 * STEPS,
        ),
    )  # fmt: skip
    return strategy


def whole_weights(strategy: Collective) -> Tensor:
    """All weights, one after the other."""
    if isinstance(strategy, DeepSpeed) and strategy.options.stage == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(strategy.model.parameters())):
            return torch.cat([p.detach().flatten() for p in strategy.model.parameters()])
    return torch.cat([p.detach().flatten() for p in strategy.model.parameters()])


def trajectory(
    cls: type[Collective], options: dict[str, Any], kind: str, rank: int, world: int, **way: Any
) -> dict[str, Any]:
    """Two epochs after a warm-up, each with an evaluation: losses [2 STEPS], weights, scores, bytes."""
    strategy = set_up(cls, options, kind, rank, world, **way)
    x, y = samples(kind)
    own = BATCH // world
    saved = strategy.save()
    for _ in range(3):
        strategy.step(x[:own].flip(0), y[-own:])
    evaluated(strategy, x)
    strategy.restore(saved)
    losses = []
    for epoch in range(2):
        order = torch.arange(len(x))[epoch * STEPS * BATCH :]
        losses += [strategy.step(x[i], y[i]) for i in islice(strategy.batches(order, 0), STEPS)]
        scores = evaluated(strategy, x)
    together = torch.stack(losses).double()
    if world > 1:
        dist.all_reduce(together)
    return {
        "losses": together / world,
        "weights": whole_weights(strategy),
        "scores": scores,
        "sent": (strategy.communication() or {}).get("sent_bytes_per_step"),
        "states": strategy.compute_model_state_bytes(),
        "report": strategy.report(),
    }


def evaluated(strategy: Collective, x: Tensor) -> Tensor:
    with strategy.open_evaluation_model() as model, torch.no_grad():
        model(x[:4])
        return model(x[4:8])


def statistics(stage: int, rank: int, world: int) -> dict[str, Tensor]:
    """BatchNorm's running means of all workers [world, 5] before, in and after an evaluation."""
    strategy = set_up(DeepSpeed, {"stage": stage}, "batchnorm", rank, world)
    x, y = samples("batchnorm")
    for i in islice(strategy.batches(torch.arange(len(x)), 0), STEPS):
        strategy.step(x[i], y[i])
    found = {"before": gathered(strategy, world)}
    with strategy.open_evaluation_model():
        found["in"] = gathered(strategy, world)
    return found | {"after": gathered(strategy, world)}


def gathered(strategy: Collective, world: int) -> Tensor:
    own = strategy.model[1].running_mean
    all_means = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(all_means, own)
    return torch.stack(all_means)


def as_it_runs(stage: int, model: str, rank: int, world: int) -> dict[str, Any]:
    """Of real steps, as the plan has them of fake ones: bytes at the peak and between, and what is sent."""
    request = request_for(stage, model, world)
    net = models.build_model_for_training(model, 10, request.input_shape, 0, CPU, torch.float32)
    strategy = fake.make_strategy_for_fake_tensors(request)
    s = replace(request.settings, per_worker_batch=8)
    worker = Worker(
        s, rank, world, world, CPU, RunFolder(Path()), models.list_shard_groups(model, net),
        task=tasks.get_task(s, request.input_shape, False),
    )  # fmt: skip
    strategy.setup(net, worker)
    batch = request.make_example_batch(8)
    saved = strategy.save()
    for _ in range(3):
        strategy.step(*batch)
    sent = strategy._sent_bytes
    strategy.restore(saved)
    for _ in range(2):
        strategy.step(*batch)
        fake.evaluate_on_fake_tensors(strategy, request)
    del saved, batch
    trace = OperatorTrace(on_cpu=True)
    fake._tag_model_states(trace, strategy, net)
    with trace:
        trace.begin_phase("forward")
        strategy.step(*request.make_example_batch(8))
        trace.begin_phase("evaluate")
    first, last = (phase.first_event for phase in trace.phases[1:])
    live = trace.list_live_bytes_after_events(first, last)
    states = strategy.compute_model_state_bytes()
    return {"peak": max(live), "between": live[0], "sent": sent, "states": states}


def work(world: int, rank: int) -> dict[str, Any]:
    """All that a group of this size runs."""
    # A lock that a killed process has left behind, where the engine would wait for it.
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    (root / "deepspeed_shm_comm").mkdir(parents=True, exist_ok=True)
    (root / "deepspeed_shm_comm" / "lock").touch()
    found: dict[str, Any] = {}
    for kind in ("text", "images"):
        for way, (changed, _) in WAYS.items():
            if way != "plain" and (kind == "images" or world == 4):
                continue
            run = lambda cls, changed=changed, kind=kind, **options: trajectory(  # noqa: E731
                cls, options, kind, rank, world, **changed
            )
            found[f"{kind} {way} ddp"] = run(DDP)
            for stage in STAGES:
                found[f"{kind} {way} {stage}"] = run(DeepSpeed, stage=stage)
    if world < 4:
        for parts in (1, 2):
            changed = {"gradient_accumulation_steps": parts, "max_grad_norm": 0.2}
            for cls, options in ((DDP, {}), *((DeepSpeed, {"stage": n}) for n in STAGES)):
                found[f"padded {parts} {options.get('stage', 'ddp')}"] = trajectory(
                    cls, options, "padded", rank, world, **changed
                )
    for stage in STAGES:
        found[f"untuned {stage}"] = trajectory(
            DeepSpeed, {"stage": stage, "match_other_strategies": False}, "text", rank, world
        )
        if world == 2:
            found[f"statistics {stage}"] = statistics(stage, rank, world)
            for model in ("vgg-compact", "gpt-compact"):
                found[f"as it runs {stage} {model}"] = as_it_runs(stage, model, rank, world)
    if world == 2:
        for name, (cls, way) in MUTANTS.items():
            changed = WAYS[way][0]
            found[f"mutant {name}"] = trajectory(cls, {"stage": 2}, "text", rank, world, **changed)
    found["compiled"] = [str(p) for p in root.rglob("*") if p.suffix in (".so", ".o")]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("groups")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        return found_by_groups(work, folder)


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """The largest relative difference of a loss, and that of the weights' distance to their norm."""
    losses = (one["losses"] - other["losses"]).abs() / other["losses"].abs()
    apart = torch.dist(one["weights"], other["weights"]) / other["weights"].norm()
    return float(losses.max()), float(apart)


# ---------------------------------------------------------------- agreement


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("kind", "way", "world"),
    [
        (kind, way, world)
        for kind, way in (("images", "plain"), *(("text", way) for way in WAYS))
        for world in ((1, 2, 4) if way == "plain" else (1, 2))
    ],
)
class TestAgreement:
    pytestmark = slow

    def test_every_stage_trains_as_ddp_does(self, found, kind, way, stage, world):
        """Bit for bit where the same numbers are summed up in the same order."""
        run, ddp = (found[world][f"{kind} {way} {name}"] for name in (stage, "ddp"))
        assert ddp["losses"].std() > 1e-3, "it does not learn: equality would say little"
        print(kind, way, stage, world, difference(run, ddp))
        if WAYS[way][1] and stage < 3 and world < 4:
            assert difference(run, ddp) == (0.0, 0.0)
            assert torch.equal(run["scores"], ddp["scores"])
        assert max(difference(run, ddp)) < NEAR
        assert run["report"]["updates_applied"] == 2 * STEPS


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
class TestWeights:
    pytestmark = slow

    def test_a_sum_and_its_weight_are_divided_as_ddp_does(self, found, stage, parts, world):
        """Before the engine clips and updates; `test_weighed.py` holds DDP to a plain loop."""
        run, ddp = (found[world][f"padded {parts} {name}"] for name in (stage, "ddp"))
        assert ddp["losses"].std() > 1e-3
        assert max(difference(run, ddp)) < NEAR


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
class TestOnEveryNumberOfWorkers:
    pytestmark = slow

    def test_its_own_defaults_train_alike(self, found, stage, world):
        assert (
            max(difference(found[world][f"untuned {stage}"], found[world]["text plain ddp"])) < NEAR
        )

    def test_it_sends_half_as_much_again_as_ddp_and_holds_its_part(self, found, stage, world):
        run = found[world][f"text plain {stage}"]
        weights = 4 * sum(p.numel() for p in network("text").parameters())
        share = (world - 1) / world
        if stage < 3:
            assert run["sent"] == pytest.approx(3 * share * weights, rel=0.01)
        else:  # once or twice each parameter, and its gradient
            assert 2 * share * weights <= run["sent"] <= 3.2 * share * weights
        states = run["states"]
        assert states["parameters_bytes"] == pytest.approx(
            weights / (world if stage == 3 else 1), rel=0.05
        )
        assert states["gradients_bytes"] == pytest.approx(
            weights / (world if stage > 1 else 1), rel=0.05
        )
        # Momentum, and the master copy.
        assert states["optimizer_bytes"] == pytest.approx(2 * weights / world, rel=0.05)


@pytest.mark.parametrize("name", MUTANTS)
class TestMutants:
    pytestmark = slow

    def test_the_comparison_sees_one_mistake(self, found, name):
        way = MUTANTS[name][1]
        apart = difference(found[2][f"mutant {name}"], found[2][f"text {way} ddp"])
        print(f"{name}: losses off by {apart[0]:.1e}, weights by {apart[1]:.1e}")
        assert max(apart) > 10 * NEAR


@pytest.mark.parametrize("stage", STAGES)
class TestAStage:
    pytestmark = slow

    def test_the_mean_of_the_statistics_is_evaluated(self, found, stage):
        means = found[2][f"statistics {stage}"]
        assert not torch.equal(means["before"][0], means["before"][1])
        torch.testing.assert_close(means["in"], means["before"].mean(0).expand(2, -1))
        assert torch.equal(means["after"], means["before"])

    @pytest.mark.parametrize("model", ["vgg-compact", "gpt-compact"])
    def test_the_plan_has_the_memory_and_the_bytes_of_real_steps(self, found, stage, model):
        real = found[2][f"as it runs {stage} {model}"]
        made = footprint.make_footprint(request_for(stage, model, 2))
        between = sum(made.between_steps_bytes.values())
        print(stage, model, "peak", made.compute_training_peak(8).n_bytes, real["peak"], "between", between,
              real["between"])  # fmt: skip
        assert made.model_states_bytes == real["states"]
        assert compute_wire_bytes(made.collectives, 2, on_gloo=False) == pytest.approx(
            real["sent"], rel=1e-3
        )
        assert (between, made.compute_training_peak(8).n_bytes) == (real["between"], real["peak"])


@pytest.mark.parametrize("world", [1, 2, 4])
class TestStart:
    pytestmark = slow

    def test_no_operator_is_compiled_and_no_lock_is_waited_for(self, found, world):
        """The groups have ended although a lock lay where the engine would have waited for it."""
        assert found[world]["compiled"] == []


# ---------------------------------------------------------------- cells


def findings(made: dict[str, Any]) -> list[str]:
    """Why the audit calls a record unusable; that the machine is busy, it may say besides."""
    evidence = AuditData(pd.DataFrame(columns=list(COLUMNS)), [made])
    return [
        f"{rule.id}: {found.values_text}"
        for rule in RULES
        if rule.severity == "unusable"
        for found in run_rule(rule, evidence)
    ]


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (1, {}),
        (2, {"gradient_accumulation_steps": 2}),
        (3, {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}),
    ],
)
class TestCells:
    pytestmark = slow

    def test_a_record_says_the_engine_and_the_audit_believes_it(self, start_cell, warm, stage, way):
        options = get_option_defaults("deepspeed") | {"stage": stage}
        # Importing PyTorch may have set them in this process, too.
        left_behind = {"TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}
        env = {key: value for key, value in warm.items() if key not in left_behind}
        launched = start_cell(settings("deepspeed", options=options, **way), env=env)
        code, output = launched.finish(240)
        assert code == 0, output
        made = launched.read_record()
        record.validate_record(made)
        version = DeepSpeed.needs[0].partition("==")[2]
        assert made["strategy"]["details"]["engine"] == f"deepspeed {version}"
        assert not any(left_behind & set(w["provenance"]["environment"]) for w in made["workers"])
        assert findings(made) == []
        for factor in (0.5, 2):
            false = copy.deepcopy(made)
            for way in ("sent", "received"):
                false["communication"][f"{way}_bytes_per_step"] *= factor
            assert invariants.broken(false)
        false = copy.deepcopy(made)
        false["memory"]["model_states"]["optimizer_bytes"] //= 2  # without the master copy
        assert any("optimizer_bytes" in found for found in invariants.broken(false))


# ---------------------------------------------------------------- without DeepSpeed


@pytest.fixture(params=["none", "0.19.7"])
def installed(request, monkeypatch) -> str:
    """What this Python has of DeepSpeed, according to its metadata."""
    known = metadata.version

    def version(name: str) -> str:
        if name != "deepspeed":
            return known(name)
        if request.param == "none":
            raise metadata.PackageNotFoundError(name)
        return request.param

    monkeypatch.setattr(metadata, "version", version)
    return request.param


def sentence(names: str, has: str) -> str:
    return (
        f"{names}: deepspeed==0.19.8 is needed, but this Python has {has}; "
        "run pip install deepspeed==0.19.8, or with --sdm conda add it to envs/stratbench.yaml"
    )


def test_what_is_missing_is_one_sentence_for_all_cells(installed):
    used = (("two", DeepSpeed), ("ddp", DDP), ("three", DeepSpeed), ("two", DeepSpeed))
    cells = [(name, cls, {}) for name, cls in used]
    assert list(needs.iter_missing_requirements(cells)) == [sentence("two, three", installed)]
    assert list(needs.iter_missing_requirements([("ddp", DDP, {})])) == []


@pytest.mark.slow
def test_plan_and_check_say_what_is_missing_and_go_on(installed):
    requests = [request_for(2, "vgg-compact", 2), footprint_request("ddp")]
    for order in (requests, requests[::-1]):
        network = check.check_neural_network(order[0])
        found = {r.strategy: check.dry_run_strategy(r, network).refusal_reason for r in order}
        assert found == {"deepspeed": sentence("deepspeed", installed), "ddp": None}
    assert check.make_footprint_or_error(requests[0]) == sentence("deepspeed", installed)


@pytest.mark.skipif(not LACKING, reason="DeepSpeed is here")
@pytest.mark.slow
def test_a_cell_says_what_is_missing_before_it_starts_a_process(start_cell):
    launched = start_cell(settings("deepspeed"))
    code, output = launched.finish()
    assert code != 0
    assert LACKING in output
    assert not list(launched.folder.path.glob("*.stack"))


def refused(**keys: Any) -> str:
    """What the config's check says of an experiment with DeepSpeed."""
    block = {
        "dataset": "digits", "strategies": ["two"], "models": ["vgg-compact"], "gpus": [2], "epochs": 1,
        "global_batch": 32, "lr": 0.1,
    }  # fmt: skip
    study = {"variants": {"two": {"strategy": "deepspeed", **keys.pop("options", {})}}}
    with pytest.raises(ConfigError) as error:
        validate_config(
            {"study": "s", "studies": {"s": study | {"experiments": {"e": block | keys}}}}
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"precision": "fp64"}, "keeps its weights in float32; use fp32"),
        ({"precision": "fp16"}, "would wait for the device in every step; use bf16"),
        ({"compile": True}, "not tested with DeepSpeed; set it to false"),
        ({"optimizer_impl": "foreach"}, "flat tensors of its own; set it to fused"),
        (
            {"activation_checkpointing": True, "dataset": "digits", "models": ["gpt-compact"]},
            "not tested with DeepSpeed; set it to false",
        ),
        ({"options": {"stage": 4}}, "stage = 4: must be at least 1 and below 4"),
        (
            {"options": {"match_other_strategies": False, "bucket_cap_mb": 5}},
            "with match_other_strategies: false DeepSpeed chooses the bucket size",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_any_job(keys, says):
    assert says in refused(**keys)


class Odd(nn.Module):
    """What the engine would train wrongly: as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(36, 8), nn.Linear(36, 8)
        self.words = nn.Embedding(4, 8, sparse=kind == "sparse")
        if kind == "mixed":
            self.second.bfloat16()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        if self.kind == "read outside":
            return self.head(flat @ self.first.weight.T) + 0 * self.words.weight.sum()
        if self.kind == "by data":
            return self.head(self.first(flat) if flat.sum() > 0 else self.second(flat))
        words = self.words(torch.zeros(len(x), dtype=torch.long))
        return self.head(self.first(flat) + words + self.second(flat.to(self.second.weight.dtype)))


@pytest.mark.parametrize(
    ("kind", "stage", "says"),
    [
        ("sparse", 1, "is sparse, which has no place in a flat bucket"),
        ("mixed", 2, "several dtypes (bfloat16, float32)"),
        ("read outside", 3, "stage 3 gathers parameters only for the call"),
        ("read outside", 2, None),
        ("by data", 2, "different data, so they would wait for each other forever"),
        ("plain", 3, None),
    ],
)
def test_networks_that_it_would_train_wrongly_are_refused(kind, stage, says):
    torch.manual_seed(0)
    model = Odd(kind)
    groups = [(name, [m]) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    x, y = samples("images")
    trial = run_trial_steps("network", model, x[:2], y[:2], (2, CLASSES), groups)
    strategy = DeepSpeed(DeepSpeed.Options(stage=stage))
    worker = Worker(settings("deepspeed"), 0, 2, 2, CPU, RunFolder(Path()), groups, trial=trial)
    told = list(strategy.iter_model_refusals(model, worker))
    assert (says is None and told == []) or (says and says in told[0]), told


def test_the_study_engines_has_every_stage_on_both_networks():
    config = validate_config(
        yaml.safe_load((ROOT / "config.yaml").read_text()) | {"study": "engines"}
    )
    study = Study(config, "engines")
    met = {
        (s.model, s.gpus, s.options["stage"])
        for s in map(study.settings, study.cells)
        if s.strategy == "deepspeed" and s.options["match_other_strategies"]
    }
    assert met == {
        (m, n, i) for m in ("vgg-compact", "gpt-compact") for n in (1, 2) for i in STAGES
    }
