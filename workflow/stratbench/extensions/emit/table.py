"""Lists the strategies that each target supports, with the target's name for each."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from stratbench.extensions.emit.choice import Choice
from stratbench.extensions.emit.errors import EmitError

#: Targets of `--to`, with a description of the file. Each is a module of `targets`.
TARGETS = {
    "accelerate": "an Accelerate config (YAML)",
    "trainer": "TrainingArguments of transformers' Trainer (Python)",
    "deepspeed": "a DeepSpeed config (JSON)",
    "lightning": "a Lightning strategy and Trainer (Python)",
    "pytorch": "plain PyTorch that trains (Python)",
    "variant": "a variant and experiment of config.yaml (YAML)",
}
#: Name of DeepSpeed in each target.
DEEPSPEED = {
    "accelerate": "DEEPSPEED",
    "trainer": "deepspeed",
    "deepspeed": "zero_optimization",
    "lightning": "DeepSpeedStrategy",
}
#: Name of each strategy in each target. A strategy without an entry is only supported by `variant`.
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


def list_supporting_targets(strategy: str) -> list[str]:
    """Return the names of the targets that support a strategy."""
    called = NAMES_IN_TARGETS.get(strategy, {})
    return [target for target in TARGETS if target in called or target == "variant"]


def format_file_for_target(choice: Choice, target: str) -> str:
    """Return the chosen cell as the text of a file for `target`.

    Raises:
        EmitError: If the target does not support the strategy; the message names the targets that do.
    """
    strategy, known = choice.settings.strategy, list_supporting_targets(choice.settings.strategy)
    if target not in known:
        engine = TARGETS[target].partition(" (")[0]
        raise EmitError(
            f"--to {target}: {engine} cannot express {choice.cell.strategy}, whose strategy is {strategy}; "
            f"choose {', '.join(known)}"
        )
    if choice.settings.workers_are_jobs and target != "variant":
        raise EmitError(
            f"--to {target}: {choice.cell.strategy} has workers that are separate jobs, which may join and "
            "leave, and only stratbench trains so; choose --to variant"
        )
    write: Callable[[Choice, str], str] = import_module(
        f"stratbench.extensions.emit.targets.{target}"
    ).write
    return write(choice, NAMES_IN_TARGETS.get(strategy, {}).get(target, ""))
