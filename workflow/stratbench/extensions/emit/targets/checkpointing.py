"""Writes the activation checkpointing of a cell, as Python code and as a comment."""

from __future__ import annotations

from stratbench.extensions.emit.choice import Choice

#: Code of `selective`, which stores the results of some operations, by their names in PyTorch.
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
#: Recomputation must repeat each operator. A weight that autocast cached before the block would not be cast
#: again.
CLEARED = "    torch.clear_autocast_cache()"


def write_checkpointing_lines(choice: Choice) -> tuple[list[str], list[str]]:
    """Return code lines that enable activation checkpointing of `blocks`, and the imports they need."""
    mode = choice.take_setting("activation_checkpointing")
    if not mode:
        return [], []
    names, lines, context = ["checkpoint"], [], ""
    if mode == "selective":
        names = ["CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts"]
        lines, context = SELECTIVE.strip().splitlines(), ", context_fn=selective"
        if choice.settings.precision in ("bf16", "fp16") and not choice.settings.compile:
            lines.insert(lines.index("    products = {False: 0, True: 0}"), CLEARED)
    every = parse_block_interval(mode)
    some = f"[{every - 1}::{every}]" if every > 1 else ""
    lines += [
        f"for block in blocks{some}:  # computed again in backward",
        f"    block.forward = partial(checkpoint, block.forward, use_reentrant=False{context})",
    ]
    imports = [
        "from functools import partial",
        f"from torch.utils.checkpoint import {', '.join(names)}",
    ]
    return lines, imports


def note_checkpointing(choice: Choice, whole: str = "", place: str = "in the script") -> None:
    """Add a note on activation checkpointing, if the cell uses it.

    Args:
        choice: The cell.
        whole: Text on a switch for all blocks, which ends with a comma.
        place: Where the user has to add checkpointing.
    """
    mode = choice.take_setting("activation_checkpointing")
    if not mode:
        return
    every = parse_block_interval(mode)
    which = f"block of {every} in a row, the last one" if every > 1 else "block"
    text = f"{place}, {whole if mode is True else ''}torch.utils.checkpoint around each {which}"
    if mode == "selective":
        text += (
            ", with a context_fn that keeps attention and every second product "
            "(create_selective_checkpoint_contexts; --to pytorch has it)"
        )
    choice.add_note(text, "activation_checkpointing")


def parse_block_interval(mode: bool | str) -> int:
    """Return N of the mode `every-N`, or 1 if each block is checkpointed."""
    return int(str(mode).partition("every-")[2] or 1)
