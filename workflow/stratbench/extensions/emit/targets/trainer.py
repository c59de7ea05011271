"""Writes a cell as arguments of transformers' Trainer, for `--to trainer`."""

from __future__ import annotations

from typing import Any

from stratbench.extensions.emit.choice import ChosenCell, format_comment_lines
from stratbench.extensions.emit.targets.checkpointing import (
    add_checkpointing_comment,
    get_checkpointed_block_interval,
)
from stratbench.extensions.emit.targets.ddp_options import (
    choose_communication_hook_name,
    list_ddp_arguments,
)
from stratbench.extensions.emit.targets.deepspeed_config import make_deepspeed_config
from stratbench.extensions.emit.targets.hyperparameters import (
    add_missing_cpu_support_comment,
    add_pure_bf16_comment,
    add_training_length_and_data_comments,
    find_optimizer_implementation,
    format_optimizer_call,
)
from stratbench.extensions.emit.targets.python_text import format_python_call
from stratbench.extensions.emit.targets.sharding_lines import (
    add_mixed_precision_comment,
    add_shard_groups_comment,
    describe_gradient_reduction,
)


def format_target_file(choice: ChosenCell, target_strategy: str) -> str:
    """Return the cell as Python code that creates transformers' TrainingArguments.

    Args:
        choice: The cell.
        target_strategy: The Trainer's word for the strategy.
    """
    s = choice.settings
    arguments: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": choice.micro_batch_size,
        "gradient_accumulation_steps": choice.get_setting_to_write("gradient_accumulation_steps"),
        **make_training_length_arguments(choice),
        **make_trainer_optimizer_arguments(choice),
        **make_lr_schedule_arguments(choice),
        # The Trainer clips gradients by default. 0.0 disables clipping.
        "max_grad_norm": choice.get_setting_to_write("max_grad_norm") or 0.0,
        "seed": choice.get_setting_to_write("seed"),
        "dataloader_drop_last": True,
        # By default the Trainer writes a checkpoint at the end.
        "save_strategy": "no",
        "use_cpu": choice.device_type == "cpu" and target_strategy in ("", "ddp"),
    }
    if target_strategy == "deepspeed":
        # No argument of the Trainer sets mixed precision, because DeepSpeed does it.
        arguments["deepspeed"] = make_deepspeed_config(choice)
        add_missing_cpu_support_comment(choice, "the Trainer", "DeepSpeed")
        if s.max_grad_norm is not None or s.gradient_accumulation_steps > 1:
            choice.add_file_comment(
                "DeepSpeed's config repeats batch, accumulation and clipping: change both"
            )
    else:
        add_precision_arguments(choice, arguments)
    if choice.get_setting_to_write("compile"):
        arguments["torch_compile"] = True
    if target_strategy == "ddp":
        options = list_ddp_arguments(choice)
        arguments["ddp_bucket_cap_mb"] = options["bucket_cap_mb"]
        # This argument is explicit, since its default depends on the model.
        arguments["ddp_find_unused_parameters"] = False
        if options.get("gradient_as_bucket_view"):
            choice.add_file_comment(
                "no argument has it; between trainer = Trainer(...) and trainer.train(), "
                "trainer.accelerator.ddp_handler.gradient_as_bucket_view = True, else DDP has each gradient "
                "twice",
                "gradient_as_bucket_view",
            )
        if hook := choose_communication_hook_name(choice):
            choice.add_file_comment(
                f"no argument has it: register torch's {hook} on the DistributedDataParallel",
                "compress",
            )
    if target_strategy == "fsdp":
        arguments |= {"fsdp": True, "fsdp_config": make_trainer_fsdp_config(choice)}
        add_missing_cpu_support_comment(choice, "the Trainer", "FSDP")
        if s.gradient_accumulation_steps > 1 and choice.options["gradient_sync"] == "each-part":
            kwargs = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
            arguments["accelerator_config"] = kwargs
        if s.activation_checkpointing is not True:
            add_checkpointing_comment(choice)
    elif s.activation_checkpointing == "selective":
        add_checkpointing_comment(choice)
    elif choice.get_setting_to_write("activation_checkpointing"):
        arguments["activation_checkpointing"] = True
        if (every := get_checkpointed_block_interval(s.activation_checkpointing)) > 1:
            arguments["activation_checkpointing_kwargs"] = {"every_n_layers": every}
            choice.add_file_comment(
                f"the Trainer takes the first layer of {every}, the cell took the last",
                "activation_checkpointing",
            )
    choice.mark_as_written("global_batch", "gpus")
    add_training_length_and_data_comments(choice, comments_on_length=False)
    start = f"start: torchrun --nnodes {choice.num_nodes} --nproc-per-node {choice.workers_per_node} train.py"
    head = format_comment_lines([*choice.cell_comments, start, *choice.file_comments])
    return f"{head}\nfrom transformers import TrainingArguments\n\n" + format_python_call(
        "args = TrainingArguments", arguments
    )


def make_training_length_arguments(choice: ChosenCell) -> dict[str, Any]:
    """Return the Trainer's argument for the length of the training, in steps or epochs."""
    epochs, steps = choice.get_setting_to_write("epochs"), choice.get_setting_to_write("steps")
    return {"max_steps": steps} if steps else {"num_train_epochs": epochs}


def make_trainer_optimizer_arguments(choice: ChosenCell) -> dict[str, Any]:
    """Return the Trainer's arguments for the optimizer and its hyperparameters."""
    s = choice.settings
    choice.mark_as_written("optimizer", "momentum", "nesterov", "betas", "eps")
    if s.weight_decay:
        choice.add_file_comment(
            "the Trainer gives norms and biases no weight decay; the cell decays all",
            "weight_decay",
        )
    keywords = {
        "learning_rate": choice.get_setting_to_write("lr"),
        "weight_decay": choice.get_setting_to_write("weight_decay"),
    }
    wanted, sharded = find_optimizer_implementation(choice), s.strategy == "fsdp"
    fused = s.optimizer == "adamw" and wanted == "fused"
    # The implementation that PyTorch chooses if the Trainer sets none.
    runs = "foreach" if choice.device_type == "cuda" and not sharded else "for-loop"
    if runs == wanted:
        choice.add_file_comment("torch's own choice here", "optimizer_impl")
    elif not fused:
        choice.add_file_comment(
            f"no argument has it, and torch runs {runs}: Trainer(optimizers=(optimizer, None)) with "
            f"optimizer = {format_optimizer_call(choice)}",
            "optimizer_impl",
        )
    if s.optimizer == "adamw":
        return {
            "optim": "adamw_torch_fused" if fused else "adamw_torch",
            **keywords,
            "adam_beta1": s.betas[0],
            "adam_beta2": s.betas[1],
            "adam_epsilon": s.eps,
        }
    texts = f"momentum={s.momentum},nesterov={s.nesterov}"
    return {"optim": "sgd", **keywords, "optim_args": texts}


def make_lr_schedule_arguments(choice: ChosenCell) -> dict[str, Any]:
    """Return the Trainer's arguments for the schedule of the learning rate."""
    kind, warmup, final = map(
        choice.get_setting_to_write, ("schedule", "lr_warmup_steps", "final_lr")
    )
    arguments: dict[str, Any] = {}
    if warmup:
        arguments["warmup_steps"] = warmup
        choice.add_file_comment("the Trainer's first step has a rate of 0; the cell's had a part of lr",
                    "lr_warmup_steps")  # fmt: skip
    if kind == "constant":
        name = "constant_with_warmup" if warmup else "constant"
    elif final and kind == "cosine":
        name, arguments["lr_scheduler_kwargs"] = "cosine_with_min_lr", {"min_lr": final}
    elif final:
        name, arguments["lr_scheduler_kwargs"] = "polynomial", {"lr_end": final, "power": 1.0}
    else:
        name = kind
    return {"lr_scheduler_type": name, **arguments}


def add_precision_arguments(choice: ChosenCell, arguments: dict[str, Any]) -> None:
    """Add the Trainer's arguments for number formats to `arguments`."""
    chosen = choice.get_setting_to_write("precision")
    if chosen in ("bf16", "fp16"):
        arguments[chosen] = True
    elif choice.device_type == "cuda":
        arguments["tf32"] = chosen == "tf32"
    if chosen == "bf16-true":
        add_pure_bf16_comment(choice)
    elif chosen == "fp64":
        choice.add_file_comment("in the script, model.double() and batches in float64", "precision")
    elif chosen == "tf32" and choice.device_type == "cpu":
        choice.add_file_comment("a CPU has none", "precision")


def make_trainer_fsdp_config(choice: ChosenCell) -> dict[str, Any]:
    """Return the value of the Trainer's argument `fsdp_config`, for FSDP2."""
    classes = choice.block_class_names
    config: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": choice.get_option_to_write("reshard_after_forward") == "always",
        "cpu_offload": choice.get_option_to_write("offload") == "cpu",
        "activation_checkpointing": choice.get_setting_to_write("activation_checkpointing") is True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "SIZE_BASED_WRAP",
    }
    if classes:
        config["transformer_layer_cls_to_wrap"] = classes
    else:
        add_shard_groups_comment(choice)
        config["min_num_params"] = choice.record["model"]["parameters"] // 12
    add_mixed_precision_comment(choice, "the Trainer")
    if choice.settings.gradient_accumulation_steps > 1:
        choice.add_file_comment(
            f"gradients are reduced with {describe_gradient_reduction(choice)}", "gradient_sync"
        )
    choice.mark_as_written("gradient_sync")
    workers = choice.shard_group_size
    if workers < choice.settings.gpus:
        choice.add_file_comment(
            "add parallelism_config=accelerate.ParallelismConfig(dp_replicate_size="
            f"{choice.settings.gpus // workers}, dp_shard_size={workers}) to the arguments",
            "shard_group_size",
        )
    return config
