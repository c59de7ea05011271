"""Writes calls of `fully_shard` (FSDP2) as Python code, and comments on sharding."""

from __future__ import annotations

from stratbench.extensions.emit.choice import ChosenCell
from stratbench.extensions.emit.targets.checkpointing import format_checkpointing_code
from stratbench.extensions.emit.targets.hyperparameters import AUTOCAST
from stratbench.extensions.emit.targets.python_text import CodeLines


def format_sharding_code(
    choice: ChosenCell, model_variable: str, fsdp_casts_weights: bool
) -> CodeLines:
    """Return code lines that shard a model by FSDP2 over the device mesh `mesh`.

    Args:
        choice: The cell.
        model_variable: Name of the model's variable in the emitted file.
        fsdp_casts_weights: Whether FSDP2 does the mixed precision, instead of autocast.
    """
    names, policy = ["fully_shard"], choice.settings.precision in AUTOCAST and fsdp_casts_weights
    always = choice.get_option_to_write("reshard_after_forward") == "always"
    arguments = ["mesh=mesh"]
    if choice.get_option_to_write("offload") == "cpu":
        names.insert(0, "CPUOffloadPolicy")
        pin = choice.device_type == "cuda"
        arguments.append(f"offload_policy=CPUOffloadPolicy(pin_memory={pin})")
    root = list(arguments)
    if policy:
        names.insert(0, "MixedPrecisionPolicy")
        dtype = AUTOCAST[choice.settings.precision]
        dtypes = f"param_dtype={dtype}, reduce_dtype=torch.float32"
        arguments.append(f"mp_policy=MixedPrecisionPolicy({dtypes})")
        root.append(f"mp_policy=MixedPrecisionPolicy({dtypes}, output_dtype=torch.float32)")
        if choice.record["model"].get("batchnorm"):
            choice.add_file_comment(
                "the cell sharded BatchNorm apart, in float32; do so before these lines"
            )
    arguments.append(f"reshard_after_forward={always}")
    if not always:
        root.append("reshard_after_forward=False")
    imports = [f"from torch.distributed.fsdp import {', '.join(sorted(names))}"]
    lines = format_block_list_lines(choice, model_variable)
    recomputing, needed = format_checkpointing_code(choice)
    imports += needed
    lines += recomputing
    lines += ["for block in blocks:", f"    fully_shard(block, {', '.join(arguments)})"]
    return CodeLines([*lines, f"fully_shard({model_variable}, {', '.join(root)})"], imports)


def format_block_list_lines(choice: ChosenCell, model_variable: str) -> list[str]:
    """Return the code line that sets `blocks`, the modules to shard one at a time."""
    if classes := choice.block_class_names:
        return [
            f"blocks = [m for m in {model_variable}.modules() if type(m).__name__ in {tuple(classes)!r}]"
        ]
    add_shard_groups_comment(choice)
    least = choice.record["model"]["parameters"] // 12
    return [
        f"blocks = [m for m in {model_variable}.children() if sum(p.numel() for p in m.parameters()) >= "
        f"{least}]"
    ]


def add_shard_groups_comment(choice: ChosenCell) -> None:
    """Add a comment that lists the cell's shard groups, for a model without block classes."""
    labels = [group["label"] for group in choice.record["strategy"].get("wrap_groups") or ()]
    choice.add_file_comment(
        f"the cell sharded {len(labels)} groups, made by size or layer ({', '.join(labels)}); "
        "the rule by size here makes others: name your blocks' classes"
    )


def add_mixed_precision_comment(choice: ChosenCell, engine: str) -> None:
    """Add a comment on how FSDP2's mixed precision in an engine differs from the cell's."""
    mixed = choice.get_option_to_write("mixed_precision")
    if choice.settings.precision not in ("bf16", "fp16"):
        return
    if mixed == "autocast":
        choice.add_file_comment(
            f"the cell gathered and reduced in float32, under torch.autocast; {engine} does both in 16 bits, "
            "which sends less and rounds more",
            "mixed_precision",
        )
    else:
        choice.add_file_comment(
            f"the cell gathered in 16 bits and reduced in float32; {engine} reduces in 16 bits, too",
            "mixed_precision",
        )


def describe_gradient_reduction(choice: ChosenCell) -> str:
    """Return a text that says after which micro-batches FSDP reduces gradients."""
    last = choice.get_option_to_write("gradient_sync") == "last-part"
    return "the last part" if last else "each part, which takes less memory"
