"""Writes the config file of `accelerate launch`, for `--to accelerate`."""

from __future__ import annotations

from typing import Any

import yaml

from stratbench.extensions.emit.choice import ChosenCell, format_comment_lines
from stratbench.extensions.emit.targets.checkpointing import add_checkpointing_comment
from stratbench.extensions.emit.targets.ddp_options import add_ddp_options_comment
from stratbench.extensions.emit.targets.deepspeed_config import make_deepspeed_config
from stratbench.extensions.emit.targets.hyperparameters import (
    add_missing_cpu_support_comment,
    add_precision_comment,
    add_script_comments,
    add_training_length_and_data_comments,
    format_lr_schedule_lines,
    format_optimizer_call,
)
from stratbench.extensions.emit.targets.sharding_lines import (
    add_mixed_precision_comment,
    add_shard_groups_comment,
    describe_gradient_reduction,
)


def format_target_file(choice: ChosenCell, target_strategy: str) -> str:
    """Return the cell as an Accelerate config file in YAML.

    Args:
        choice: The cell.
        target_strategy: Accelerate's `distributed_type` for the strategy.
    """
    s, on_cpu = choice.settings, choice.device_type == "cpu"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": target_strategy,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": choice.num_nodes,
        "num_processes": choice.get_setting_to_write("gpus"),
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": on_cpu and target_strategy in ("NO", "MULTI_GPU"),
    }
    if target_strategy == "DEEPSPEED":
        config["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": False,
        }
        # This call marks the settings that deepspeed.json contains. No comment then lists them.
        make_deepspeed_config(choice)
        add_checkpointing_comment(choice)
        choice.add_file_comment(
            "deepspeed.json, next to this file: stratbench emit CELL --to deepspeed --output deepspeed.json"
        )
        choice.add_file_comment(
            f"in the script, {format_optimizer_call(choice)}", "optimizer", "lr"
        )
        if format_lr_schedule_lines(choice):
            choice.add_file_comment("in the script; deepspeed.json has the formula", "schedule")
        add_training_length_and_data_comments(choice)
        add_missing_cpu_support_comment(choice, "Accelerate", "DeepSpeed")
    else:
        add_script_comments(choice, describe_gradient_accumulation(choice))
        if s.precision in ("bf16", "fp16"):
            config["mixed_precision"] = choice.get_setting_to_write("precision")
        add_precision_comment(choice)
        if choice.get_setting_to_write("compile"):
            config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
        if target_strategy == "FSDP":
            config |= make_accelerate_fsdp_config(choice)
        else:
            add_checkpointing_comment(choice, "model.gradient_checkpointing_enable(), or ")
        if target_strategy == "MULTI_GPU":
            add_ddp_options_comment(choice)
            if on_cpu:
                choice.add_file_comment(
                    "MULTI_GPU starts CPU processes, too, where MULTI_CPU needs MPI; the variable before "
                    "`accelerate` has them stay on CPUs"
                )
    if choice.num_nodes > 1:
        choice.add_file_comment(
            "main_process_ip and main_process_port, and machine_rank on each node, are yours"
        )
    threads = f" --num_cpu_threads_per_process {s.threads}" if s.threads else ""
    variable = "ACCELERATE_USE_CPU=true " if config["use_cpu"] else ""
    start = f"start: {variable}accelerate launch --config_file FILE{threads} train.py"
    head = format_comment_lines([*choice.cell_comments, start, *choice.file_comments])
    return head + yaml.safe_dump(config, sort_keys=False)


def describe_gradient_accumulation(choice: ChosenCell) -> str:
    """Return a comment on how the script accumulates gradients over micro-batches.

    FSDP reduces gradients as often as in the cell.
    """
    sync = choice.get_option_to_write("gradient_sync")
    parts = choice.settings.gradient_accumulation_steps
    if parts > 1 and sync is not None:
        choice.add_file_comment(
            f"gradients are reduced with {describe_gradient_reduction(choice)}", "gradient_sync"
        )
    if sync != "each-part":
        return f"in the script, Accelerator(gradient_accumulation_steps={parts})"
    return (
        "in the script, Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin("
        f"num_steps={parts}, sync_each_batch=True))"
    )


def make_accelerate_fsdp_config(choice: ChosenCell) -> dict[str, Any]:
    """Return the keys `fsdp_config` and `parallelism_config` of an Accelerate config."""
    s, classes = choice.settings, choice.block_class_names
    offload = choice.get_option_to_write("offload")
    fsdp: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": choice.get_option_to_write("reshard_after_forward")
        == "always",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "SIZE_BASED_WRAP",
        "fsdp_offload_params": offload == "cpu",
        "fsdp_activation_checkpointing": choice.get_setting_to_write("activation_checkpointing")
        is True,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if classes:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(classes)
    else:
        add_shard_groups_comment(choice)
        fsdp["fsdp_min_num_params"] = choice.record["model"]["parameters"] // 12
    if s.activation_checkpointing is not True:
        add_checkpointing_comment(choice)
    config: dict[str, Any] = {"fsdp_config": fsdp}
    workers = choice.shard_group_size
    if workers < s.gpus:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": s.gpus // workers,
            "parallelism_config_dp_shard_size": workers,
        }
    add_mixed_precision_comment(choice, "Accelerate")
    choice.add_file_comment(
        "Accelerate shards embeddings, the last norm and the head apart, too; the cell left them to the root"
    )
    add_missing_cpu_support_comment(choice, "Accelerate", "FSDP")
    return config
