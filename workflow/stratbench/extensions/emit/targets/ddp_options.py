"""Writes options of DistributedDataParallel (DDP) for Accelerate, Lightning and plain PyTorch."""

from __future__ import annotations

from typing import Any

from stratbench.extensions.emit.choice import ChosenCell

#: PyTorch's communication hook for each value of the option `compress` (gradient compression).
HOOKS = {"fp16": "fp16_compress_hook", "bf16": "bf16_compress_hook", "powersgd": "powerSGD_hook"}


def list_ddp_arguments(choice: ChosenCell) -> dict[str, Any]:
    """Return the keyword arguments of DistributedDataParallel that the cell sets."""
    keys = ("bucket_cap_mb", "gradient_as_bucket_view")
    return {key: choice.get_option_to_write(key) for key in keys if key in choice.options}


def choose_communication_hook_name(choice: ChosenCell) -> str | None:
    """Return PyTorch's communication hook for the cell's gradient compression, or None without one."""
    compress = choice.get_option_to_write("compress", "none")
    rank, start = (
        choice.get_option_to_write("powersgd_rank"),
        choice.get_option_to_write("powersgd_start_step"),
    )
    if compress == "none":
        return None
    if compress == "powersgd":
        choice.add_file_comment(
            f"the cell ran stratbench's PowerSGD of rank {rank} from step {start} on, to which torch's hook "
            "comes close: it compresses by other thresholds"
        )
    return HOOKS[compress]


def format_powersgd_state_call(choice: ChosenCell) -> str:
    """Return the code that creates the state of PyTorch's PowerSGD communication hook."""
    o = choice.options
    return (
        f"powerSGD_hook.PowerSGDState(None, matrix_approximation_rank={o['powersgd_rank']}, "
        f"start_powerSGD_iter={o['powersgd_start_step']})"
    )


def add_ddp_options_comment(choice: ChosenCell) -> None:
    """Add a comment with the code that passes DDP's options to `Accelerator`."""
    arguments, hook = list_ddp_arguments(choice), choose_communication_hook_name(choice)
    keywords = [f"{key}={value!r}" for key, value in arguments.items()]
    if hook is not None:
        kind = {"fp16": "FP16", "bf16": "BF16", "powersgd": "POWER_SGD"}[choice.options["compress"]]
        keywords.append(f"comm_hook=DDPCommunicationHookType.{kind}")
        if kind == "POWER_SGD":
            keywords.append(
                f"comm_state_option={{'matrix_approximation_rank': {choice.options['powersgd_rank']}, "
                f"'start_powerSGD_iter': {choice.options['powersgd_start_step']}}}"
            )
    choice.add_file_comment(
        f"in the script, Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({', '.join(keywords)})])"
    )
