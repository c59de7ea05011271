"""Writes a cell's activation checkpointing to emitted files, as Python code or as a comment."""

from __future__ import annotations

from stratbench.extensions.emit.choice import ChosenCell
from stratbench.extensions.emit.targets.python_text import CodeLines

#: Emitted code for `activation_checkpointing: selective`, which stores the results of some operators only.
SELECTIVE = """
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.linear.default, aten.convolution.default}
KEPT = {  # where attention has a dropout, take it out: what is drawn at random has to be drawn again
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_reduce.default,
}
def selective():  # attention and every second product are kept, as in torchtitan
    products = {False: 0, True: 0}
    def keep(context, op, *args, **kwargs):
        keeps = op in KEPT
        if op in PRODUCTS:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(keep)
"""
#: Emitted line that clears autocast's cache before a block. Backward then repeats the same casts of weights.
CLEARED = "    torch.clear_autocast_cache()"


def format_checkpointing_code(choice: ChosenCell) -> CodeLines:
    """Return code lines that checkpoint the activations of the modules in the list `blocks`."""
    mode = choice.get_setting_to_write("activation_checkpointing")
    if not mode:
        return CodeLines([], [])
    names, lines, context = ["checkpoint"], [], ""
    if mode == "selective":
        names = ["CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts"]
        lines, context = SELECTIVE.strip().splitlines(), ", context_fn=selective"
        if choice.settings.precision in ("bf16", "fp16") and not choice.settings.compile:
            lines.insert(lines.index("    products = {False: 0, True: 0}"), CLEARED)
    every = get_checkpointed_block_interval(mode)
    some = f"[{every - 1}::{every}]" if every > 1 else ""
    lines += [
        f"for block in blocks{some}:  # computed again in backward",
        f"    block.forward = partial(checkpoint, block.forward, use_reentrant=False{context})",
    ]
    imports = [
        "from functools import partial",
        f"from torch.utils.checkpoint import {', '.join(names)}",
    ]
    return CodeLines(lines, imports)


def add_checkpointing_comment(
    choice: ChosenCell, switch_for_all_blocks: str = "", place_in_script: str = "in the script"
) -> None:
    """Add a comment on how to enable activation checkpointing, if the cell uses it.

    Args:
        choice: The cell.
        switch_for_all_blocks: Text on a call that checkpoints all blocks, ending with "or "; may be empty.
        place_in_script: Place in the user's script where checkpointing is enabled.
    """
    mode = choice.get_setting_to_write("activation_checkpointing")
    if not mode:
        return
    every = get_checkpointed_block_interval(mode)
    which = f"block of {every} in a row, the last one" if every > 1 else "block"
    switch = switch_for_all_blocks if mode is True else ""
    text = f"{place_in_script}, {switch}torch.utils.checkpoint around each {which}"
    if mode == "selective":
        text += (
            ", with a context_fn that keeps attention and every second product "
            "(create_selective_checkpoint_contexts; --to pytorch has it)"
        )
    choice.add_file_comment(text, "activation_checkpointing")


def get_checkpointed_block_interval(checkpointing_mode: bool | str) -> int:
    """Return N if `activation_checkpointing` is `every-N`, or 1 if each block is checkpointed."""
    return int(str(checkpointing_mode).partition("every-")[2] or 1)
