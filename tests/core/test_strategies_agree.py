"""All strategies are the same arithmetic: equal losses and weights, in real process groups.

Each group of processes is started once and runs everything that needs its size; the tests compare
what it left. Mutants (one mistake each) go through the same comparison and must fail it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import WORLDS, found_by_groups
from torch import Tensor, nn

from stratbench.cell.learning_rate import compute_lr_factor
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.strategies import get_option_defaults
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.strategies.ddp import DDP
from stratbench.strategies.sharding.fsdp import FSDP
from stratbench.strategies.sharding.zero import TorchZeRO1, ZeRO1
from stratbench.strategies.single import Single
from stratbench.workload.network import models
from stratbench.workload.network.checkpointing import checkpoint_and_count_blocks
from stratbench.workload.network.gpt import GPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

STEPS, GLOBAL_BATCH, CLASSES = 4, 8, 3
FEW_STEPS = 3  # as many as a schedule needs to rise and fall
TOLERANCE = 1e-12


# ---------------------------------------------------------------- what the processes run


class Summed(DDP):
    """Mutant: gradients are summed over the workers instead of averaged."""

    def assign_gradients_to_updated_tensors(self) -> None:
        for p in self.parameters:
            p.grad.mul_(self.worker.world_size)


class Unsynchronised(Single):
    """Mutant: every worker trains alone."""

    def wrap(self, model: nn.Module, worker: Worker) -> nn.Module:
        return model


class UncorrectedMoments(DDP):
    """Mutant: AdamW counts no steps, so that its moments stay uncorrected for their start."""

    def assign_gradients_to_updated_tensors(self) -> None:
        for entry in self.optimizer.state.values():
            entry["step"].fill_(1e6)


class WarmUpCounts(DDP):
    """Mutant: the schedule goes on from where the warm-up was."""

    def reset(self) -> None:
        before = getattr(self, "steps", 0)
        super().reset()
        self.steps = before


class OwnNorm(FSDP):
    """Mutant: each worker clips by the norm of its own part."""

    gradient_norm = Collective.gradient_norm


class Added(DDP):
    """Mutant: the gradients of a batch's parts are added, not averaged."""

    def add_batch_part_gradients(
        self, x: Tensor, y: Tensor, parts: int = 1, is_last_part: bool = True
    ) -> Tensor:
        return super().add_batch_part_gradients(x, y, 1, is_last_part) / parts


class Ungathered(ZeRO1):
    """Mutant: each worker sees the update of its own part only."""

    def _gather_weights(self) -> None: ...


class WholeNorm(FSDP):
    """Mutant: the norm is that of all groups' shards together, though each holds a whole model."""

    def gradient_norm(self) -> Tensor:
        self.shard_group = None
        return super().gradient_norm()


class FedBack(DDP):
    """Mutant: what PowerSGD lost in the warm-up is fed back to the training."""

    def reset(self) -> None:
        compressor, self.compressor = self.compressor, None
        super().reset()
        self.compressor = compressor


class SameShard(DDP):
    """Mutant: every worker trains on the first worker's samples."""

    def batches(self, order: Tensor, epoch: int) -> Iterator[Tensor]:
        s = self.worker.settings
        yield from order[: STEPS * GLOBAL_BATCH].view(STEPS, -1, s.per_worker_batch)[:, 0]


class Alternating(nn.Module):
    """Calls its second layer in every other training step only: in between it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(36, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.always(x.flatten(1)).tanh()
        self.calls += self.training
        return self.head(self.sometimes(h) if self.calls % 2 else h)


#: Where one is derived from another, it comes first.
BASES = {"single": Single, "fsdp": FSDP, "zero1": ZeRO1, "zero1-torch": TorchZeRO1, "ddp": DDP}
STRATEGIES: dict[str, tuple[type[Collective], dict[str, Any]]] = {
    "single": (Single, {}),
    "ddp": (DDP, {}),
    "fsdp-always": (FSDP, {"reshard_after_forward": "always"}),
    "fsdp-never": (FSDP, {"reshard_after_forward": "never"}),
    "fsdp-policy": (FSDP, {"mixed_precision": "policy"}),
    "fsdp-pairs": (FSDP, {"shard_group_size": 2}),
    "fsdp-offload": (FSDP, {"offload": "cpu"}),
    "fsdp-last-part": (FSDP, {"gradient_sync": "last-part"}),
    "zero1": (ZeRO1, {}),
    "zero1-torch": (TorchZeRO1, {}),
    "summed": (Summed, {}),
    "ungathered": (Ungathered, {}),
    "unsynchronised": (Unsynchronised, {}),
    "same-shard": (SameShard, {}),
}
ADAMW = {"optimizer": "adamw", "momentum": 0.0, "nesterov": False, "betas": [0.9, 0.99], "eps": 1e-8,
         "lr": 0.01}  # fmt: skip
#: Ways to train beside the plain one: the settings changed, a mutant that only this way can have, and
#: how far weights may be apart.
WAYS: dict[str, tuple[dict[str, Any], tuple[type[Collective], dict[str, Any]] | None, float]] = {
    "adamw": (ADAMW, (UncorrectedMoments, {}), 1e-9),
    "cosine": (
        {"schedule": "cosine", "lr_warmup_steps": 1, "optimizer": "sgd"},
        (WarmUpCounts, {}),
        TOLERANCE,
    ),
    "recomputed": ({"activation_checkpointing": True}, None, 0.0),
    "selective": ({"activation_checkpointing": "selective"}, None, 0.0),
    "every second": ({"activation_checkpointing": "every-2"}, None, 0.0),
    "parts": ({"gradient_accumulation_steps": 2}, (Added, {}), TOLERANCE),
    "loss in parts": ({"loss_chunks": 2}, None, TOLERANCE),
    "clip": ({"max_grad_norm": 0.2}, (OwnNorm, {"reshard_after_forward": "always"}), TOLERANCE),
}
#: Those that compute the same as the plain way, bit for bit.
RECOMPUTED = ("recomputed", "selective", "every second")
#: In fp64 or on a CPU, or where a batch is computed whole, they are `fsdp-always`.
SAME = {"fsdp-policy", "fsdp-offload", "fsdp-last-part"}
#: Ways of DDP to send gradients: options, and whether then a step is the same but for rounding.
SENDING: dict[str, tuple[dict[str, Any], bool]] = {
    "fp16": ({"compress": "fp16"}, False),
    "bf16": ({"compress": "bf16"}, False),
    "rank-1": ({"compress": "powersgd", "powersgd_rank": 1, "powersgd_start_step": 2}, False),
    "rank-99": ({"compress": "powersgd", "powersgd_rank": 99, "powersgd_start_step": 2}, True),
}
MUTANTS = ["summed", "unsynchronised", "same-shard", "ungathered"]
#: Of several workers, those that say that their arithmetic is DDP's: each is held to it.
EQUAL = [
    name
    for name, (cls, options) in STRATEGIES.items()
    if name not in MUTANTS
    and cls.max_workers is None
    and cls(cls.Options(**options)).traits(2).equals_ddp
]


def network(batchnorm: bool = False) -> nn.Sequential:
    """Widths that no worker count divides: with 4 workers some shards are padded, some empty."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.BatchNorm2d(5) if batchnorm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(5, 7, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(28, 13),
        nn.ReLU(),
        nn.Linear(13, CLASSES),
    )


def samples(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Images (brighter the higher the label), labels, and an order with a few samples to spare."""
    generator = torch.Generator().manual_seed(1)
    count = STEPS * GLOBAL_BATCH + 5
    y = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    x = (noise + 3 * (y.double() - 1).view(-1, 1, 1, 1)).to(dtype)
    return x, y, torch.randperm(count, generator=generator)


def set_up(
    name: str,
    rank: int,
    world: int,
    precision: str = "fp64",
    batchnorm: bool = False,
    model: nn.Module | None = None,
    way: str | None = None,
    **changed: Any,
) -> Collective:
    """The strategy on `model`, or else on `network`; `changed`: options."""
    settings, mutant, _ = WAYS[way] if way else ({}, None, 0.0)
    cls, options = mutant if name == "mutant" else STRATEGIES[name]
    base = next(known for known, kind in BASES.items() if issubclass(cls, kind))
    s = Settings(
        strategy=base, options=get_option_defaults(base) | options | changed, model="test", dataset="test",
        gpus=world, seed=0, epochs=1, global_batch=GLOBAL_BATCH,
        per_worker_batch=GLOBAL_BATCH // world, lr=0.1, momentum=0.9, weight_decay=1e-3,
        nesterov=True, precision=precision, augment=False, warmup_steps=3, device="cpu", threads=1,
        slowdown=None,
    )  # fmt: skip
    s = replace(s, **settings)
    torch.manual_seed(0)
    groups = []
    if model is not None:
        groups = [
            (label, [module])
            for label, module in model.named_modules()
            if type(module).__name__ in ("Block", "EncoderBlock", "Bottleneck")
        ]
        if mode := s.activation_checkpointing:
            assert checkpoint_and_count_blocks(groups, mode) == len(groups) // (
                2 if mode == "every-2" else 1
            )
    else:
        model = network(batchnorm).to(torch.float64 if precision == "fp64" else torch.float32)
        groups = [("convolutions", [model[0], model[3]]), ("linear", [model[7]])]
    strategy = cls(cls.Options(**s.options))
    strategy.setup(
        model,
        Worker(
            s,
            rank,
            world,
            world,
            torch.device("cpu"),
            RunFolder(Path()),
            groups,
            total_steps=FEW_STEPS,
            input_shape=(5,),
        ),
    )
    return strategy


def train(
    strategy: Collective, x: Tensor, y: Tensor, order: Tensor, steps: int = STEPS
) -> list[Tensor]:
    """The loss of each step, this worker's own."""
    return [strategy.step(x[i], y[i]) for i in islice(strategy.batches(order, 0), steps)]


def full_weights(strategy: Collective) -> list[Tensor]:
    """The whole weights; shards, which are equal numbers of rows but for the last, in one collective."""
    weights = [p.detach() for p in strategy.model.parameters()]
    if not hasattr(weights[0], "to_local"):
        return [w.clone() for w in weights]
    mesh = weights[0].device_mesh
    size = mesh.size(mesh.ndim - 1)
    padded = []
    for w in weights:
        own, row = w.to_local().flatten(), w.numel() // len(w)
        padded.append(nn.functional.pad(own, (0, -(-len(w) // size) * row - len(own))))
    together = gathered(torch.cat(padded), size, mesh.get_group(mesh.ndim - 1))
    parts = together.split([len(p) for p in padded], dim=1)
    return [
        part.reshape(-1, *w.shape[1:])[: len(w)].clone()
        for part, w in zip(parts, weights, strict=True)
    ]


def trajectory(name: str, rank: int, world: int, warm_up: bool = False) -> dict[str, Any]:
    """Losses averaged over the workers [STEPS] and the final weights."""
    x, y, order = samples(torch.float64)
    strategy = set_up(name, rank, world)
    if warm_up:
        saved = strategy.save()
        for _ in range(3):
            strategy.step(-3 * x[: GLOBAL_BATCH // world], y[: GLOBAL_BATCH // world])
        with strategy.open_evaluation_model() as model, torch.no_grad():
            model(x[:4])
        strategy.restore(saved)
    losses = torch.stack(train(strategy, x, y, order))
    if world > 1:
        dist.all_reduce(losses)
    report = strategy.report()
    return {
        "losses": losses / world,
        "weights": full_weights(strategy),
        "updates": report["updates_applied"],
    }


def transformer(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network, and its samples: texts, for a head that is the embedding; or images."""
    generator = torch.Generator().manual_seed(1)
    count = STEPS * GLOBAL_BATCH
    torch.manual_seed(0)
    if kind == "gpt":
        model = GPT(7, 5, layers=2, heads=2, width=6)
        text = torch.randint(7, (count, 6), generator=generator)
        return model.double(), text[:, :-1], text[:, 1:]
    models.import_torchvision()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        8, 4, num_layers=2, num_heads=2, hidden_dim=18, mlp_dim=30, num_classes=CLASSES
    )
    nn.init.trunc_normal_(model.heads.head.weight, std=0.02)  # at zero nothing below it would learn
    x = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return model.double(), x, torch.randint(CLASSES, (count,), generator=generator)


def transformer_trajectory(
    kind: str, name: str, rank: int, world: int, way: str | None = None
) -> dict[str, Any]:
    """Losses averaged over the workers [FEW_STEPS] and the final weights, each tensor once.

    A warm-up comes first where a way is given: it must leave no trace.
    """
    model, x, y = transformer(kind)
    strategy = set_up(name, rank, world, model=model, way=way)
    if way:
        saved = strategy.save()
        train(strategy, x.flip(0), y, torch.arange(len(x)), 1)
        with strategy.open_evaluation_model() as evaluated, torch.no_grad():
            evaluated(x[:4])
        strategy.restore(saved)
    losses = torch.stack(train(strategy, x, y, torch.arange(len(x)), FEW_STEPS))
    if world > 1:
        dist.all_reduce(losses)
    return {
        "losses": losses / world,
        "weights": full_weights(strategy),
        "states": strategy.compute_model_state_bytes()["optimizer_bytes"],
        "report": strategy.report(),
    }


def alternating_trajectory(name: str, rank: int, world: int) -> dict[str, Any]:
    """The same of a network that calls a layer in every other step, under plain SGD.

    Without momentum and decay an update by a gradient of zeros is none.
    """
    x, y, order = samples(torch.float64)
    torch.manual_seed(0)
    strategy = set_up(name, rank, world, model=Alternating().double())
    for group in strategy.optimizer.param_groups:
        group.update(momentum=0.0, nesterov=False, weight_decay=0.0)
    losses = torch.stack(train(strategy, x, y, order, FEW_STEPS))
    if world > 1:
        dist.all_reduce(losses)
    return {"losses": losses / world, "weights": full_weights(strategy)}


def sending(rank: int, world: int) -> dict[Any, Any]:
    """Of each way to send gradients, with and without a warm-up: losses, weights and what is said of it."""
    found: dict[Any, Any] = {}
    runs = [(DDP, name, warm) for name in SENDING for warm in (False, True)]
    for cls, name, warm in [*runs, (FedBack, "rank-1", True)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(STRATEGIES, "sending", (cls, SENDING[name][0]))
            one = trajectory("sending", rank, world, warm)
        found["fed-back" if cls is FedBack else (name, warm)] = one
    return found


def powersgd_in_buckets(rank: int, world: int) -> list[Tensor]:
    """Every worker's weights, [world, ...], after steps whose gradients fill several buckets."""
    torch.manual_seed(0)
    wide = [layer for _ in range(4) for layer in (nn.Linear(400, 400), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 400), nn.ReLU(), *wide, nn.Linear(400, 3))
    options = {"compress": "powersgd", "powersgd_start_step": 2, "bucket_cap_mb": 1}
    strategy = set_up("ddp", rank, world, model=model.double(), **options)
    x, y, order = samples(torch.float64)
    for _ in range(2):
        train(strategy, x, y, order)
    assert len(strategy.report()["details"]["bucket_bytes"]) > 3
    return [gathered(w, world) for w in full_weights(strategy)]


def whole_norm(rank: int, world: int) -> dict[str, Any]:
    """Two groups of two that clip by the norm of both models together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STRATEGIES, "whole-norm", (WholeNorm, {"shard_group_size": 2}))
        return transformer_trajectory("gpt", "whole-norm", rank, world, "clip")


def recomputed(name: str, rank: int, world: int) -> dict[str, Tensor]:
    """What BatchNorm layers in blocks end with: weights and statistics, blocks computed again or not."""
    x = samples(torch.float64)[0].expand(-1, 3, -1, -1)
    y = samples(torch.float64)[1]
    ends = {}
    for way in (None, "recomputed"):
        torch.manual_seed(0)
        model = models.build_model("resnet-compact", CLASSES, (3, 32, 32)).double()
        strategy = set_up(name, rank, world, model=model, way=way)
        train(strategy, x, y, torch.arange(len(x)), 3)
        tensors = [*full_weights(strategy), *(b.double() for b in strategy.model.buffers())]
        ends[way or "plain"] = torch.cat([t.flatten() for t in tensors])
    return ends


def gathered(tensor: Tensor, world: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """`tensor` of every rank of the group, [world, ...]."""
    out = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(out, tensor.contiguous(), group=group)
    return torch.stack(out)


def batchnorm_statistics(name: str, rank: int, world: int) -> dict[str, Tensor]:
    """The running means of all workers before, during and after an evaluation, and a step later."""
    x, y, order = samples(torch.float64)
    strategy = set_up(name, rank, world, batchnorm=True)
    train(strategy, x, y, order, FEW_STEPS)
    bn = strategy.model[1]
    before = gathered(bn.running_mean, world)
    count = int(bn.num_batches_tracked)
    with strategy.open_evaluation_model() as model, torch.no_grad():
        during = gathered(bn.running_mean, world)
        outputs = gathered(model(x[:4]), world)
        assert not bn.training
    assert bn.training
    return {
        "before": before,
        "during": during,
        "after": gathered(bn.running_mean, world),
        "outputs": outputs,
        "tracked": torch.tensor([count, int(bn.num_batches_tracked)]),
    }


def batchnorm_trajectory(name: str, rank: int, world: int, evaluate: bool) -> list[Tensor]:
    """Final weights and statistics, with or without an evaluation after every step."""
    x, y, order = samples(torch.float64)
    strategy = set_up(name, rank, world, batchnorm=True)
    for i in islice(strategy.batches(order, 0), FEW_STEPS):
        strategy.step(x[i], y[i])
        if evaluate:
            with strategy.open_evaluation_model() as model, torch.no_grad():
                model(x[:4])
    with strategy.open_evaluation_model():
        return [*full_weights(strategy), *(b.clone() for b in strategy.model.buffers())]


def precision_run(name: str, rank: int, world: int, precision: str) -> dict[str, Any]:
    x, y, order = samples(torch.float32)
    strategy = set_up(name, rank, world, precision, batchnorm=True)
    seen = []
    strategy.model[3].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    losses = torch.stack(train(strategy, x, y, order, FEW_STEPS)).double()
    if world > 1:
        dist.all_reduce(losses)
    with strategy.open_evaluation_model() as model, torch.no_grad():
        logits = model(x[:4])
    return {
        "losses": losses / world,
        "convolved": str(seen[0]),
        "evaluated": str(logits.dtype),
        "weights": str(next(strategy.model.parameters()).dtype),
        "report": strategy.report(),
    }


def shared_overflow(name: str, rank: int, world: int) -> dict[str, Any]:
    """fp16; in step 1 and 3 one worker's gradient overflows: under FSDP its own shard of one."""
    x, y, order = samples(torch.float32)
    strategy = set_up(name, rank, world, "fp16")
    strategy.scaler._init_scale = 8.0  # small enough that nothing overflows by itself
    link = strategy.assign_gradients_to_updated_tensors
    step = 0

    def overflow() -> None:
        link()
        if name == "fsdp-always" and step in (0, 2) and rank == world - 1:
            strategy.local[0].grad.fill_(float("inf"))

    strategy.assign_gradients_to_updated_tensors = overflow
    reductions = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kw: (reductions.append(1), reduce(*args, **kw))
    moved = []
    for i in islice(strategy.batches(order, 0), STEPS):
        before = [t.clone() for t in strategy.local]
        own = x[i] * (1e30 if name == "ddp" and step in (0, 2) and rank == world - 1 else 1)
        strategy.step(own, y[i])
        pairs = zip(strategy.local, before, strict=True)
        moved.append(any(not torch.equal(now, then) for now, then in pairs))
        step += 1
    dist.all_reduce = reduce
    everyone = gathered(torch.tensor(moved), world)
    weights = full_weights(strategy)
    return {
        "moved": everyone,
        "reductions": len(reductions),
        "skipped": gathered(torch.tensor(strategy.scaler.count_skipped_steps()), world),
        "finite": all(bool(w.isfinite().all()) for w in weights),
        "updates": strategy.report()["updates_applied"],
    }


def layouts(rank: int, world: int, as_view: bool) -> dict[str, Any]:
    """DDP on a network as training builds it, with batches as they come on a CPU and on a GPU."""
    found: dict[str, Any] = {}
    for name, memory_format in (
        ("plain", torch.contiguous_format), ("last", torch.channels_last)
    ):  # fmt: skip
        model = models.build_model_for_training(
            "resnet-compact", CLASSES, (3, 32, 32), 0, torch.device("cpu"), torch.float64
        )
        strategy = set_up("ddp", rank, world, model=model, gradient_as_bucket_view=as_view)
        strides: list[bool] = []
        outputs: list[bool] = []
        model.conv1.register_forward_hook(
            lambda m, a, out, to=outputs, f=memory_format: to.append(
                out.is_contiguous(memory_format=f)
            )
        )
        strategy.optimizer.register_step_pre_hook(
            lambda optimizer, *_, to=strides: to.extend(
                p.stride() == p.grad.stride() == optimizer.state[p]["momentum_buffer"].stride()
                for p in strategy.local  # noqa: B023
            )
        )
        generator = torch.Generator().manual_seed(rank)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):  # DDP builds its buckets anew after the first
                x = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)
                y = torch.randint(CLASSES, (4,), generator=generator)
                strategy.step(x.contiguous(memory_format=memory_format), y)
        found[name] = {
            "strides": strides,
            "outputs": outputs,
            "warnings": [str(w.message) for w in told if "stride" in str(w.message)],
            "weights": full_weights(strategy),
        }
    return found


def shards(rank: int, world: int) -> Tensor:
    """The samples of every worker, [world, STEPS, per_worker_batch]."""
    _, _, order = samples(torch.float64)
    return gathered(torch.stack(list(set_up("ddp", rank, world).batches(order, 0))), world)


def different(world: int, names: list[str]) -> list[str]:
    """Those that are not `fsdp-always` here; groups of two are all workers where there are two."""
    alike = SAME | ({"fsdp-pairs"} if world < 4 else set())
    return [name for name in names if name not in alike]


def ways_of(way: str, world: int) -> list[str]:
    """Those that are trained in a way; when weights are freed matters to forward and backward alone.

    Four workers tell of pairs, and of updates by shards some of which are empty, what two do not.
    One worker does nothing in a way that two do not.
    """
    if world == 1:
        return ["single"]
    if world == 4:
        shards = {"adamw": ["fsdp-pairs", "fsdp-always"], "recomputed": ["fsdp-pairs"]}
        return (shards | {"parts": ["fsdp-pairs"], "clip": shards["adamw"]}).get(way, [])
    alike = set() if way in (*RECOMPUTED[:2], "parts") else {"fsdp-never"}
    own = ["fsdp-last-part"] if way == "parts" else []
    return [name for name in different(world, EQUAL) if name not in alike] + own


def kinds_of(way: str, world: int) -> list[str]:
    """The networks trained in a way; what computes blocks again looks for them in each network."""
    return ["gpt", "vit"] if way == "recomputed" and world == 1 else ["gpt"]


def transformers_of(kind: str, world: int) -> list[str]:
    """Who trains a transformer: the mutants once, and images on four workers as pairs alone."""
    if kind == "vit":
        return ["fsdp-pairs"] if world == 4 else different(world, EQUAL)
    return EQUAL + MUTANTS if world == 2 else different(world, EQUAL)


def work(world: int, rank: int) -> dict[str, Any]:
    """Everything the tests want to know from a group of this size."""
    names = {1: ["single"], 2: MUTANTS, 4: []}[world] + EQUAL
    found: dict[str, Any] = {name: trajectory(name, rank, world) for name in names}
    reference = ["single"] if world == 1 else []
    found["transformers"] = {
        kind: {
            name: transformer_trajectory(kind, name, rank, world)
            for name in reference + transformers_of(kind, world)
        }
        for kind in ("gpt", "vit")
    }
    found["ways"] = {
        (way, kind, name): transformer_trajectory(kind, name, rank, world, way)
        for way in WAYS
        for kind in kinds_of(way, world)
        for name in [
            *ways_of(way, world),
            *(["mutant"] if WAYS[way][1] and world == 2 else []),
        ]
    }
    alternating = "single" if world == 1 else "zero1"
    found["alternating"] = alternating_trajectory(alternating, rank, world)
    if world == 1:
        found["warm"] = {
            name: trajectory(name, rank, world, warm_up=True) for name in different(1, names)
        }
        found["precision"] = {
            p: precision_run("single", rank, 1, p) for p in ("fp32", "tf32", "bf16", "fp16")
        }
    else:
        found["shards"] = shards(rank, world)
    if world == 4:
        found["whole-norm"] = whole_norm(rank, world)
        found["bn"] = {"fsdp-pairs": batchnorm_statistics("fsdp-pairs", rank, world)}
    if world == 2:
        found["sending"] = sending(rank, world)
        found["buckets"] = powersgd_in_buckets(rank, world)
        found["recomputed"] = {
            name: recomputed(name, rank, world) for name in ("ddp", "fsdp-always")
        }
        sharing = different(world, EQUAL)
        found["bn"] = {name: batchnorm_statistics(name, rank, world) for name in sharing}
        found["bn_evaluated"] = {
            name: [batchnorm_trajectory(name, rank, world, e) for e in (False, True)]
            for name in sharing
        }
        found["precision"] = {
            (name, p): precision_run(name, rank, world, p)
            for name in ("ddp", "fsdp-always", "fsdp-policy")
            for p in ("bf16", "fp16")
        }
        found["overflow"] = {
            name: shared_overflow(name, rank, world) for name in ("ddp", "fsdp-always")
        }
        found["layouts"] = {as_view: layouts(rank, world, as_view) for as_view in (True, False)}
    return found


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What groups of 1, 2 and 4 processes found, by size."""
    return found_by_groups(work, tmp_path_factory.mktemp("groups"))


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """The largest difference in a step's loss, and in a weight after the last step."""
    losses = (one["losses"] - other["losses"]).abs().max()
    weights = max(
        float((a - b).abs().max()) for a, b in zip(one["weights"], other["weights"], strict=True)
    )
    return float(losses), weights


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return max(difference(one, other)) <= TOLERANCE


def test_the_reference_learns(found):
    """Otherwise equality would say little."""
    losses = found[1]["single"]["losses"]
    assert len(losses) == found[1]["single"]["updates"] == STEPS
    assert losses[STEPS // 2 :].mean() < losses[: STEPS // 2].mean()
    assert losses.std() > 1e-3


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_strategy_equals_single_at_the_global_batch(found, world, name):
    assert agree(found[world][name], found[1]["single"]), difference(
        found[world][name], found[1]["single"]
    )


@pytest.mark.parametrize(
    ("kind", "world", "name"),
    [
        (kind, world, name)
        for kind in ("gpt", "vit")
        for world in (1, 2, 4)
        for name in transformers_of(kind, world)
    ],
)
def test_transformers_too_equal_single(found, kind, world, name):
    """Shared weights and attention included; and the mutants do not."""
    one, other = found[world]["transformers"][kind][name], found[1]["transformers"][kind]["single"]
    assert one["losses"].std() > 1e-3, "it does not learn: equality would say little"
    assert agree(one, other) == (name in EQUAL), difference(one, other)


@pytest.mark.parametrize(
    ("way", "kind", "world"),
    [(way, kind, world) for way in WAYS for world in WORLDS for kind in kinds_of(way, world)],
)
def test_every_way_to_train_is_the_same_under_all_strategies(found, way, kind, world):
    """After a warm-up, and different from the plain way; one mistake in the way itself is seen."""
    reference = found[1]["ways"][way, kind, "single"]
    assert reference["losses"].std() > 1e-3, "it does not learn: equality would say little"
    plain = found[1]["transformers"][kind]["single"]
    if way in RECOMPUTED:
        assert difference(plain, reference) == (0.0, 0.0)
    elif way in ("parts", "loss in parts"):  # one large batch
        assert agree(plain, reference), difference(plain, reference)
    else:
        assert difference(plain, reference)[1] > 1e-4, "it changes nothing"
    for name in ways_of(way, world):
        run = found[world]["ways"][way, kind, name]
        assert run["report"]["updates_applied"] == FEW_STEPS, name
        if way in RECOMPUTED:  # the same operations in the same order
            assert agree(run, found[world]["transformers"][kind][name]), name
            continue
        loss, weight = difference(run, reference)
        assert loss <= TOLERANCE, (name, loss)
        assert weight <= WAYS[way][2], (name, weight)
    if WAYS[way][1] and world == 2:
        loss, weight = difference(found[2]["ways"][way, kind, "mutant"], reference)
        assert loss > 1e-6, (loss, weight)
        assert weight > 1e-6, (loss, weight)


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_without_a_gradient_is_not_updated_by_the_last_ones(found, world):
    assert agree(found[world]["alternating"], found[1]["alternating"])


def test_groups_clip_by_the_norm_of_one_model(found):
    loss, weight = difference(found[4]["whole-norm"], found[1]["ways"]["clip", "gpt", "single"])
    assert min(loss, weight) > 1e-6, (loss, weight)


@pytest.mark.parametrize("name", SENDING)
def test_gradients_in_fewer_bytes_are_near_and_their_warm_up_leaves_no_trace(found, name):
    """Where nothing can be compressed it is DDP; in 16 bits it differs a little, at rank 1 more."""
    cold, warm = found[2]["sending"][name, False], found[2]["sending"][name, True]
    loss, weight = difference(cold, found[1]["single"])
    print(f"{name}: loss off by {loss:.1e}, weights by {weight:.1e}")
    assert agree(cold, found[1]["single"]) == SENDING[name][1]
    assert loss < {"fp16": 1e-2, "bf16": 5e-2}.get(name, 0.5)
    # Another grouping of sums, which rounding to 16 bits makes larger.
    near = {"fp16": 1e-2, "bf16": 5e-2}.get(name, 1e-9)
    assert max(difference(warm, cold)) < near, difference(warm, cold)
    if name == "rank-1":
        assert min(difference(found[2]["sending"]["fed-back"], cold)) > 1e-4


def test_workers_agree_on_which_bucket_powersgd_compresses(found):
    """torch's hook begins collectives in callbacks, which gloo runs in any order."""
    for weights in found[2]["buckets"]:
        assert weights.isfinite().all()
        assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("name", ["ddp", "fsdp-always"])
def test_batchnorm_sees_each_batch_once_where_blocks_are_computed_again(found, name):
    ends = found[2]["recomputed"][name]
    assert torch.equal(ends["plain"], ends["recomputed"])


def test_adamws_states_are_two_moments_and_a_count_for_each_tensor(found):
    run = found[1]["ways"]["adamw", "gpt", "single"]
    numbers = sum(w.numel() for w in run["weights"])
    assert run["states"] == 2 * 8 * numbers + 4 * len(run["weights"])
    assert run["report"]["details"]["optimizer_dtype"] == "float64"


@pytest.mark.parametrize("name", EQUAL)
def test_one_worker_equals_single_exactly(found, name):
    assert difference(found[1][name], found[1]["single"]) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["single", *different(1, EQUAL)])
def test_warm_up_of_one_worker_leaves_no_trace(found, name):
    assert difference(found[1]["warm"][name], found[1][name]) == (0.0, 0.0)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_catches_mutants(found, name):
    loss, weight = difference(found[2][name], found[1]["single"])
    print(f"{name}: loss off by {loss:.1e}, weights by {weight:.1e}")
    assert not agree(found[2][name], found[1]["single"])
    assert loss > 1e-3
    assert weight > 1e-3


@pytest.mark.parametrize("world", [2, 4])
def test_workers_share_out_each_global_batch(found, world):
    mine = found[world]["shards"]
    _, _, order = samples(torch.float64)
    expected = order[: STEPS * GLOBAL_BATCH].view(STEPS, GLOBAL_BATCH)
    together = mine.permute(1, 0, 2).reshape(STEPS, GLOBAL_BATCH)
    assert torch.equal(together, expected)


@pytest.mark.parametrize("name", different(2, EQUAL))
def test_training_statistics_are_each_workers_own(found, name):
    """FSDP never synchronises them; under DDP rank 1 has seen its own batch since the broadcast."""
    before = found[2]["bn"][name]["before"]
    assert not torch.equal(before[0], before[1])


def test_ddp_evaluates_rank_0s_statistics(found):
    bn = found[2]["bn"]["ddp"]
    assert torch.equal(bn["during"], bn["before"][:1].expand(2, -1))
    assert torch.equal(bn["outputs"][0], bn["outputs"][1])


@pytest.mark.parametrize(
    ("world", "name"), [(2, "fsdp-always"), (2, "fsdp-never"), (4, "fsdp-pairs")]
)
def test_fsdp_evaluates_the_mean_and_gives_back_the_own_statistics(found, world, name):
    """The mean over all workers, also where each two hold a model."""
    bn = found[world]["bn"][name]
    torch.testing.assert_close(bn["during"], bn["before"].mean(0).expand(world, -1))
    assert torch.equal(bn["after"], bn["before"])
    assert torch.equal(bn["outputs"], bn["outputs"][:1].expand_as(bn["outputs"]))
    assert bn["tracked"].tolist() == [FEW_STEPS, FEW_STEPS]


@pytest.mark.parametrize("name", different(2, EQUAL))
def test_evaluating_does_not_change_training(found, name):
    without, evaluated = found[2]["bn_evaluated"][name]
    assert all(torch.equal(a, b) for a, b in zip(without, evaluated, strict=True))


@pytest.mark.parametrize("name", ["ddp", "fsdp-always"])
def test_an_overflow_on_one_worker_makes_all_workers_skip(found, name):
    """Where gradients are sharded by a reduction of the flag; else they all have it anyway."""
    overflow = found[2]["overflow"][name]
    assert overflow["reductions"] == (STEPS if name == "fsdp-always" else 0)
    expected = torch.tensor([step not in (0, 2) for step in range(STEPS)])
    assert torch.equal(overflow["moved"], expected.expand(2, -1))
    assert overflow["skipped"].tolist() == [2, 2]
    assert overflow["updates"] == STEPS - 2
    assert overflow["finite"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp-always", "fsdp-policy"])
def test_mixed_precision_computes_in_16_bits_and_follows_fp32(found, name, precision):
    runs = found[1]["precision"] if name == "single" else found[2]["precision"]
    run = runs[precision if name == "single" else (name, precision)]
    reference = found[1]["precision"]["fp32"]["losses"]
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert run["convolved"] == f"torch.{dtype}"
    assert run["weights"] == "torch.float32"
    assert run["evaluated"] == "torch.float32"
    assert run["report"]["details"]["weights_dtype"] == "float32"
    how = "MixedPrecisionPolicy, float32 reduction" if name == "fsdp-policy" else "autocast"
    assert run["report"]["details"]["compute_dtype"] == f"{dtype} ({how})"
    skipped = run["report"]["details"]["skipped_steps"]
    assert run["report"]["updates_applied"] == FEW_STEPS - skipped
    assert run["losses"].isfinite().all()
    if not skipped:
        assert 0 < (run["losses"] - reference).abs().max() < 0.05


def test_tf32_on_a_cpu_is_called_what_it_is(found):
    runs = found[1]["precision"]
    assert runs["tf32"]["report"]["details"]["compute_dtype"] == (
        "float32 (no TensorFloat-32 on a CPU)"
    )
    assert torch.equal(runs["tf32"]["losses"], runs["fp32"]["losses"])
    assert runs["fp32"]["report"]["details"] == {
        "skipped_steps": 0, "optimizer_dtype": "float32", "weights_dtype": "float32",
        "compute_dtype": "float32",
    }  # fmt: skip


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e6])
def test_gradients_are_clipped_after_the_loss_scale_is_taken_off(monkeypatch, max_grad_norm):
    """In fp16: a step moves lr x max_grad_norm where that clips; overflows are skipped and counted once."""
    x, y, _ = samples(torch.float32)
    way = {"max_grad_norm": max_grad_norm, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    monkeypatch.setitem(WAYS, "clipped", (way, (Single, {}), 0.0))
    strategy = set_up("single", 0, 1, "fp16", way="clipped")
    plain = set_up("single", 0, 1, "fp16")
    for one in (strategy, plain):
        one.step(x[:8] * 1e30, y[:8])
        assert one.report()["details"]["skipped_steps"] == 1
    before = [w.clone() for w in full_weights(strategy)]
    loss = strategy.step(x[:8], y[:8])
    pairs = zip(full_weights(strategy), before, strict=True)
    moved = torch.cat([(now - then).flatten() for now, then in pairs]).norm()
    assert strategy.report()["details"]["skipped_steps"] == 1
    assert loss.isfinite()
    if max_grad_norm < 1:
        assert moved == pytest.approx(0.1 * max_grad_norm, rel=0.01)
    else:
        assert moved > 1e-3


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 1, [1, 1, 2 / 3, 1 / 3]),
        ("cosine", 0, [1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
        ("cosine", 2, [0.5, 1, 1, 0.5]),
    ],
)
def test_a_schedule_is_a_formula_of_the_step(schedule, warmup, expected):
    assert [compute_lr_factor(schedule, i, 4, warmup) for i in range(4)] == pytest.approx(expected)
    above = [compute_lr_factor(schedule, i, 4, warmup, final_factor=0.2) for i in range(warmup, 4)]
    assert above == pytest.approx(
        expected[warmup:] if schedule == "constant" else [0.2 + 0.8 * e for e in expected[warmup:]]
    )


def test_momentum_starts_from_zero_where_the_first_step_is_skipped():
    """torch's fused SGD, which GPUs use, would leave it uninitialised."""
    x, y, _ = samples(torch.float32)
    strategy = set_up("single", 0, 1, "fp16")
    strategy.optimizer.param_groups[0]["fused"] = True
    strategy.optimizer._step_supports_amp_scaling = True
    saved = strategy.save()
    for _ in range(2):  # from `setup`, and from `restore`
        strategy.step(x[:8] * 1e30, y[:8])
        assert strategy.report()["details"]["skipped_steps"] == 1
        for state in strategy.optimizer.state.values():
            assert torch.count_nonzero(state["momentum_buffer"]) == 0
        strategy.restore(saved)


@pytest.mark.parametrize("as_view", [True, False])
def test_ddps_gradients_lie_as_its_weights_do_whatever_batches_do(found, as_view):
    """The fused SGD of a GPU refuses others; contiguous weights then compute in channels_last."""
    runs = found[2]["layouts"][as_view]
    for run in runs.values():
        assert run["strides"]
        assert all(run["strides"])
        assert all(run["outputs"])
        assert run["warnings"] == []
    for one, other in zip(runs["plain"]["weights"], runs["last"]["weights"], strict=True):
        # The formats sum in another order, and BatchNorm over few samples magnifies that.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)
