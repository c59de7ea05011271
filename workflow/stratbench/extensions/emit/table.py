"""Table of the strategies that each target supports, and their names there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from stratbench.extensions.emit.choice import Choice
from stratbench.extensions.emit.errors import EmitError

#: Each target, with the module that writes it and what the file is.
TARGETS = {
    "accelerate": "an Accelerate config (YAML)",
    "trainer": "TrainingArguments of transformers' Trainer (Python)",
    "deepspeed": "a DeepSpeed config (JSON)",
    "lightning": "a Lightning strategy and Trainer (Python)",
    "pytorch": "plain PyTorch that trains (Python)",
    "variant": "a variant and experiment of config.yaml (YAML)",
}
#: Targets' names for DeepSpeed.
DEEPSPEED = {
    "accelerate": "DEEPSPEED",
    "trainer": "deepspeed",
    "deepspeed": "zero_optimization",
    "lightning": "DeepSpeedStrategy",
}
#: Each target's name for a strategy. A strategy without a row is only supported by `variant`.
CALLED: dict[str, dict[str, str]] = {
    "single": {"accelerate": "NO", "trainer": "", "lightning": "auto", "pytorch": ""},
    "ddp": {
        "accelerate": "MULTI_GPU",
        "trainer": "ddp",
        "lightning": "DDPStrategy",
        "pytorch": "DistributedDataParallel",
    },
    "fsdp": {
        "accelerate": "FSDP",
        "trainer": "fsdp",
        "lightning": "ModelParallelStrategy",
        "pytorch": "fully_shard",
    },
    "zero1": DEEPSPEED | {"pytorch": "ZeroRedundancyOptimizer"},
    "zero1-torch": DEEPSPEED | {"pytorch": "ZeroRedundancyOptimizer"},
    "deepspeed": DEEPSPEED,
}


def targets_of(strategy: str) -> list[str]:
    """Return the targets that support a strategy."""
    called = CALLED.get(strategy, {})
    return [target for target in TARGETS if target in called or target == "variant"]


def emit(choice: Choice, target: str) -> str:
    """Return the cell as the text of a file for `target`.

    Raises:
        EmitError: The target does not support the strategy; the message names those that do.
    """
    strategy, known = choice.settings.strategy, targets_of(choice.settings.strategy)
    if target not in known:
        engine = TARGETS[target].partition(" (")[0]
        raise EmitError(
            f"{choice.cell.strategy} cannot be said as {engine}: strategy {strategy} has the target"
            f"{'s' if len(known) > 1 else ''} {', '.join(known)}"
        )
    if choice.settings.workers_are_jobs and target != "variant":
        raise EmitError(
            f"{choice.cell.strategy} has workers that are jobs of their own and come and go, which "
            "stratbench alone trains; it has the target variant"
        )
    write: Callable[[Choice, str], str] = import_module(
        f"stratbench.extensions.emit.targets.{target}"
    ).write
    return write(choice, CALLED.get(strategy, {}).get(target, ""))
