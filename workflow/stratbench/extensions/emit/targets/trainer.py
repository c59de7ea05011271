"""Writes a cell as arguments of transformers' Trainer, for `--to trainer`."""

from __future__ import annotations

from typing import Any

from stratbench.extensions.emit.choice import Choice, format_comments
from stratbench.extensions.emit.targets.checkpointing import (
    note_checkpointing,
    parse_block_interval,
)
from stratbench.extensions.emit.targets.ddp_options import choose_comm_hook, list_ddp_arguments
from stratbench.extensions.emit.targets.deepspeed_config import make_deepspeed_config
from stratbench.extensions.emit.targets.hyperparameters import (
    find_optimizer_implementation,
    note_length_and_data,
    note_missing_cpu_support,
    note_pure_bf16,
    write_optimizer_call,
)
from stratbench.extensions.emit.targets.python_text import write_call
from stratbench.extensions.emit.targets.sharding_lines import (
    describe_gradient_reduction,
    note_mixed_precision,
    note_shard_groups,
)


def format_target_file(choice: Choice, target_strategy: str) -> str:
    """Return the cell as Python code that creates transformers' TrainingArguments.

    Args:
        choice: The cell.
        target_strategy: The Trainer's word for the strategy.
    """
    s = choice.settings
    arguments: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": choice.micro_batch_size,
        "gradient_accumulation_steps": choice.take_setting("gradient_accumulation_steps"),
        **make_length_arguments(choice),
        **make_optimizer_arguments(choice),
        **make_schedule_arguments(choice),
        # The Trainer clips gradients by default. 0.0 disables clipping.
        "max_grad_norm": choice.take_setting("max_grad_norm") or 0.0,
        "seed": choice.take_setting("seed"),
        "dataloader_drop_last": True,
        # By default the Trainer writes a checkpoint at the end.
        "save_strategy": "no",
        "use_cpu": choice.device == "cpu" and target_strategy in ("", "ddp"),
    }
    choice.take_setting("global_batch")
    if target_strategy == "deepspeed":
        # DeepSpeed does the mixed precision, so that no argument of the Trainer sets it.
        arguments["deepspeed"] = make_deepspeed_config(choice)
        note_missing_cpu_support(choice, "the Trainer", "DeepSpeed")
        if s.max_grad_norm is not None or s.gradient_accumulation_steps > 1:
            choice.add_note(
                "DeepSpeed's config repeats batch, accumulation and clipping: change both"
            )
    else:
        add_precision_arguments(choice, arguments)
    if choice.take_setting("compile"):
        arguments["torch_compile"] = True
    if target_strategy == "ddp":
        options = list_ddp_arguments(choice)
        arguments["ddp_bucket_cap_mb"] = options["bucket_cap_mb"]
        # This argument is explicit, since its default depends on the model.
        arguments["ddp_find_unused_parameters"] = False
        if options.get("gradient_as_bucket_view"):
            choice.add_note(
                "no argument has it; between trainer = Trainer(...) and trainer.train(), "
                "trainer.accelerator.ddp_handler.gradient_as_bucket_view = True, else DDP has each gradient "
                "twice",
                "gradient_as_bucket_view",
            )
        if hook := choose_comm_hook(choice):
            choice.add_note(
                f"no argument has it: register torch's {hook} on the DistributedDataParallel",
                "compress",
            )
    if target_strategy == "fsdp":
        arguments |= {"fsdp": True, "fsdp_config": make_fsdp_config(choice)}
        note_missing_cpu_support(choice, "the Trainer", "FSDP")
        if s.gradient_accumulation_steps > 1 and choice.options["gradient_sync"] == "each-part":
            kwargs = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
            arguments["accelerator_config"] = kwargs
        if s.activation_checkpointing is not True:
            note_checkpointing(choice)
    elif s.activation_checkpointing == "selective":
        note_checkpointing(choice)
    elif choice.take_setting("activation_checkpointing"):
        arguments["activation_checkpointing"] = True
        if (every := parse_block_interval(s.activation_checkpointing)) > 1:
            arguments["activation_checkpointing_kwargs"] = {"every_n_layers": every}
            choice.add_note(
                f"the Trainer takes the first layer of {every}, the cell took the last",
                "activation_checkpointing",
            )
    choice.take_setting("gpus")
    note_length_and_data(choice, comments_on_length=False)
    start = f"start: torchrun --nnodes {choice.num_nodes} --nproc-per-node {choice.workers_per_node} train.py"
    head = format_comments([*choice.title_comments, start, *choice.comments])
    return f"{head}\nfrom transformers import TrainingArguments\n\n" + write_call(
        "args = TrainingArguments", arguments
    )


def make_length_arguments(choice: Choice) -> dict[str, Any]:
    """Return the Trainer's argument for the length of the training, in steps or epochs."""
    epochs, steps = choice.take_setting("epochs"), choice.take_setting("steps")
    return {"max_steps": steps} if steps else {"num_train_epochs": epochs}


def make_optimizer_arguments(choice: Choice) -> dict[str, Any]:
    """Return the Trainer's arguments for the optimizer and its hyperparameters."""
    s = choice.settings
    for key in ("optimizer", "momentum", "nesterov", "betas", "eps"):
        choice.take_setting(key)
    if s.weight_decay:
        choice.add_note(
            "the Trainer gives norms and biases no weight decay; the cell decays all",
            "weight_decay",
        )
    keywords = {
        "learning_rate": choice.take_setting("lr"),
        "weight_decay": choice.take_setting("weight_decay"),
    }
    wanted, sharded = find_optimizer_implementation(choice), s.strategy == "fsdp"
    fused = s.optimizer == "adamw" and wanted == "fused"
    # The implementation that PyTorch chooses if the Trainer sets none.
    runs = "foreach" if choice.device == "cuda" and not sharded else "for-loop"
    if runs == wanted:
        choice.add_note("torch's own choice here", "optimizer_impl")
    elif not fused:
        choice.add_note(
            f"no argument has it, and torch runs {runs}: Trainer(optimizers=(optimizer, None)) with "
            f"optimizer = {write_optimizer_call(choice)}",
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


def make_schedule_arguments(choice: Choice) -> dict[str, Any]:
    """Return the Trainer's arguments for the schedule of the learning rate."""
    kind, warmup, final = map(choice.take_setting, ("schedule", "lr_warmup_steps", "final_lr"))
    arguments: dict[str, Any] = {}
    if warmup:
        arguments["warmup_steps"] = warmup
        choice.add_note("the Trainer's first step has a rate of 0; the cell's had a part of lr",
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


def add_precision_arguments(choice: Choice, arguments: dict[str, Any]) -> None:
    """Add the Trainer's arguments for number formats to `arguments`."""
    chosen = choice.take_setting("precision")
    if chosen in ("bf16", "fp16"):
        arguments[chosen] = True
    elif choice.device == "cuda":
        arguments["tf32"] = chosen == "tf32"
    if chosen == "bf16-true":
        note_pure_bf16(choice)
    elif chosen == "fp64":
        choice.add_note("in the script, model.double() and batches in float64", "precision")
    elif chosen == "tf32" and choice.device == "cpu":
        choice.add_note("a CPU has none", "precision")


def make_fsdp_config(choice: Choice) -> dict[str, Any]:
    """Return the value of the Trainer's argument `fsdp_config`, for FSDP2."""
    classes = choice.block_class_names
    config: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": choice.take_option("reshard_after_forward") == "always",
        "cpu_offload": choice.take_option("offload") == "cpu",
        "activation_checkpointing": choice.take_setting("activation_checkpointing") is True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "SIZE_BASED_WRAP",
    }
    if classes:
        config["transformer_layer_cls_to_wrap"] = classes
    else:
        note_shard_groups(choice)
        config["min_num_params"] = choice.record["model"]["parameters"] // 12
    note_mixed_precision(choice, "the Trainer")
    if choice.settings.gradient_accumulation_steps > 1:
        choice.add_note(
            f"gradients are reduced with {describe_gradient_reduction(choice)}", "gradient_sync"
        )
    choice.take_option("gradient_sync")
    workers = choice.shard_group_size
    if workers < choice.settings.gpus:
        choice.add_note(
            "add parallelism_config=accelerate.ParallelismConfig(dp_replicate_size="
            f"{choice.settings.gpus // workers}, dp_shard_size={workers}) to the arguments",
            "shard_group_size",
        )
    return config
