"""Lists the file formats of `--to`, and the strategies that each format supports."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from stratbench.extensions.emit.choice import ChosenCell
from stratbench.extensions.emit.errors import EmitError

#: Description of the emitted file for each target of `--to`.
TARGETS = {
    "accelerate": "an Accelerate config (YAML)",
    "trainer": "TrainingArguments of transformers' Trainer (Python)",
    "deepspeed": "a DeepSpeed config (JSON)",
    "lightning": "a Lightning strategy and Trainer (Python)",
    "pytorch": "plain PyTorch that trains (Python)",
    "variant": "a variant and experiment of config.yaml (YAML)",
}
#: Name of the strategy DeepSpeed in the file of each target.
DEEPSPEED = {
    "accelerate": "DEEPSPEED",
    "trainer": "deepspeed",
    "deepspeed": "zero_optimization",
    "lightning": "DeepSpeedStrategy",
}
#: Name of each strategy in the file of each target. Strategies without a name here can be emitted as
#: `variant` only.
NAMES_IN_TARGETS: dict[str, dict[str, str]] = {
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


def list_emit_targets_of_strategy(strategy: str) -> list[str]:
    """Return the targets of `--to` that support a strategy."""
    names = NAMES_IN_TARGETS.get(strategy, {})
    return [target for target in TARGETS if target in names or target == "variant"]


def format_file_for_target(choice: ChosenCell, target: str) -> str:
    """Return the text of the file to emit for a target of `--to`.

    Raises:
        EmitError: If the target does not support the strategy; the message names the targets that do.
    """
    strategy, known = (
        choice.settings.strategy,
        list_emit_targets_of_strategy(choice.settings.strategy),
    )
    if target not in known:
        engine = TARGETS[target].partition(" (")[0]
        raise EmitError(
            f"--to {target}: {engine} cannot express the strategy {strategy} of {choice.cell.strategy}; "
            f"choose {', '.join(known)}"
        )
    if choice.settings.workers_are_jobs and target != "variant":
        raise EmitError(
            f"--to {target}: {choice.cell.strategy} trains with workers that are separate jobs "
            "(`elastic: true`), which only stratbench supports; choose --to variant"
        )
    format_target_file: Callable[[ChosenCell, str], str] = import_module(
        f"stratbench.extensions.emit.targets.{target}"
    ).format_target_file
    return format_target_file(choice, NAMES_IN_TARGETS.get(strategy, {}).get(target, ""))
