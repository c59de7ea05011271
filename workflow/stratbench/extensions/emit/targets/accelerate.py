"""Writes the config file of `accelerate launch`, for `--to accelerate`."""

from __future__ import annotations

from typing import Any

import yaml

from stratbench.extensions.emit.choice import Choice, format_comments
from stratbench.extensions.emit.targets.checkpointing import note_checkpointing
from stratbench.extensions.emit.targets.ddp_options import note_ddp_options
from stratbench.extensions.emit.targets.deepspeed_config import make_deepspeed_config
from stratbench.extensions.emit.targets.hyperparameters import (
    note_length_and_data,
    note_missing_cpu_support,
    note_precision,
    note_script_duties,
    write_optimizer_call,
    write_schedule_lines,
)
from stratbench.extensions.emit.targets.sharding_lines import (
    describe_gradient_reduction,
    note_mixed_precision,
    note_shard_groups,
)


def format_target_file(choice: Choice, target_strategy: str) -> str:
    """Return the cell as an Accelerate config file in YAML.

    Args:
        choice: The cell.
        target_strategy: Accelerate's `distributed_type` for the strategy.
    """
    s, on_cpu = choice.settings, choice.device == "cpu"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": target_strategy,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": choice.num_nodes,
        "num_processes": choice.take_setting("gpus"),
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": on_cpu and target_strategy in ("NO", "MULTI_GPU"),
    }
    if target_strategy == "DEEPSPEED":
        config["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": False,
        }
        # This call marks the settings that deepspeed.json contains, so that no comment lists them.
        make_deepspeed_config(choice)
        note_checkpointing(choice)
        choice.add_note(
            "deepspeed.json, next to this file: stratbench emit CELL --to deepspeed --output deepspeed.json"
        )
        choice.add_note(f"in the script, {write_optimizer_call(choice)}", "optimizer", "lr")
        if write_schedule_lines(choice):
            choice.add_note("in the script; deepspeed.json has the formula", "schedule")
        note_length_and_data(choice)
        note_missing_cpu_support(choice, "Accelerate", "DeepSpeed")
    else:
        note_script_duties(
            choice,
            clipping_text="in the script, accelerator.clip_grad_norm_(model.parameters(), {norm})",
            accumulation_text=describe_accumulation(choice),
            is_compiled_by_file=True,
        )
        if s.precision in ("bf16", "fp16"):
            config["mixed_precision"] = choice.take_setting("precision")
        note_precision(choice)
        if choice.take_setting("compile"):
            config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
        if target_strategy == "FSDP":
            config |= make_fsdp_config(choice)
        else:
            note_checkpointing(choice, "model.gradient_checkpointing_enable(), or ")
        if target_strategy == "MULTI_GPU":
            note_ddp_options(choice)
            if on_cpu:
                choice.add_note(
                    "MULTI_GPU starts CPU processes, too, where MULTI_CPU needs MPI; the variable before "
                    "`accelerate` has them stay on CPUs"
                )
    if choice.num_nodes > 1:
        choice.add_note(
            "main_process_ip and main_process_port, and machine_rank on each node, are yours"
        )
    threads = f" --num_cpu_threads_per_process {s.threads}" if s.threads else ""
    variable = "ACCELERATE_USE_CPU=true " if config["use_cpu"] else ""
    start = f"start: {variable}accelerate launch --config_file FILE{threads} train.py"
    head = format_comments([*choice.title_comments, start, *choice.comments])
    return head + yaml.safe_dump(config, sort_keys=False)


def describe_accumulation(choice: Choice) -> str:
    """Return a comment on how the script accumulates gradients over `{parts}` micro-batches.

    The caller fills in `{parts}`. FSDP reduces gradients as often as in the cell.
    """
    sync = choice.take_option("gradient_sync")
    if choice.settings.gradient_accumulation_steps > 1 and sync is not None:
        choice.add_note(
            f"gradients are reduced with {describe_gradient_reduction(choice)}", "gradient_sync"
        )
    if sync != "each-part":
        return "in the script, Accelerator(gradient_accumulation_steps={parts})"
    return (
        "in the script, Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin("
        "num_steps={parts}, sync_each_batch=True))"
    )


def make_fsdp_config(choice: Choice) -> dict[str, Any]:
    """Return the keys `fsdp_config` and `parallelism_config` of an Accelerate config."""
    s, classes = choice.settings, choice.block_class_names
    offload = choice.take_option("offload")
    fsdp: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": choice.take_option("reshard_after_forward") == "always",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "SIZE_BASED_WRAP",
        "fsdp_offload_params": offload == "cpu",
        "fsdp_activation_checkpointing": choice.take_setting("activation_checkpointing") is True,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if classes:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(classes)
    else:
        note_shard_groups(choice)
        fsdp["fsdp_min_num_params"] = choice.record["model"]["parameters"] // 12
    if s.activation_checkpointing is not True:
        note_checkpointing(choice)
    config: dict[str, Any] = {"fsdp_config": fsdp}
    workers = choice.shard_group_size
    if workers < s.gpus:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": s.gpus // workers,
            "parallelism_config_dp_shard_size": workers,
        }
    note_mixed_precision(choice, "Accelerate")
    choice.add_note(
        "Accelerate shards embeddings, the last norm and the head apart, too; the cell left them to the root"
    )
    note_missing_cpu_support(choice, "Accelerate", "FSDP")
    return config
