"""Writes a cell as code that creates Lightning's strategy and Trainer, for `--to lightning`."""

from __future__ import annotations

from typing import Any

from stratbench.extensions.emit.choice import ChosenCell, format_comment_lines
from stratbench.extensions.emit.targets.checkpointing import add_checkpointing_comment
from stratbench.extensions.emit.targets.ddp_options import (
    choose_communication_hook_name,
    format_powersgd_state_call,
    list_ddp_arguments,
)
from stratbench.extensions.emit.targets.deepspeed_config import make_deepspeed_config
from stratbench.extensions.emit.targets.hyperparameters import (
    add_missing_cpu_support_comment,
    add_training_length_and_data_comments,
    format_lr_schedule_lines,
    format_optimizer_call,
)
from stratbench.extensions.emit.targets.python_text import (
    UnquotedCode,
    format_python_call,
    wrap_long_call_line,
)
from stratbench.extensions.emit.targets.sharding_lines import format_sharding_code

#: Emitted method that frees gradients after each step. Lightning itself frees them only after the next
#: forward: gradients and activations would then be in memory at once.
FREE_GRADIENTS = (
    "def optimizer_step(self, epoch, batch, optimizer, closure):  # of your LightningModule",
    "    optimizer.step(closure)",
    "    optimizer.zero_grad()  # else gradients are in memory in the next forward, too",
)
#: Value of Lightning's `precision` for each `precision` of stratbench. Lightning has no value for
#: TensorFloat-32.
PRECISION = {
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "bf16-true": "bf16-true",
    "fp64": "64-true",
}


def format_target_file(choice: ChosenCell, target_strategy: str) -> str:
    """Return the cell as Python code that creates Lightning's strategy and Trainer.

    Args:
        choice: The cell.
        target_strategy: Lightning's class for the strategy, or `auto`.
    """
    s = choice.settings
    imports = ["import torch", "from lightning.pytorch import Trainer"]
    if target_strategy != "auto":
        imports.append(f"from lightning.pytorch.strategies import {target_strategy}")
    model: list[str] = []
    if target_strategy == "DDPStrategy":
        strategy = format_ddp_strategy_call(choice, imports)
    elif target_strategy == "ModelParallelStrategy":
        strategy = f"{target_strategy}(data_parallel_size={s.gpus}, tensor_parallel_size=1)\n"
        model = format_configure_model_method(choice, imports)
    elif target_strategy == "DeepSpeedStrategy":
        config = make_deepspeed_config(choice)
        # Lightning sets these keys of the DeepSpeed config itself.
        for key in ("gradient_accumulation_steps", "train_batch_size"):
            del config[key]
        strategy = format_python_call(target_strategy, {"config": config})
        add_missing_cpu_support_comment(choice, "Lightning", "DeepSpeed")
    else:
        strategy = "'auto'\n"
    if target_strategy != "ModelParallelStrategy":
        add_checkpointing_comment(choice, place_in_script="in configure_model")
    if choice.get_setting_to_write("compile"):
        choice.add_file_comment(
            "in configure_model, self.model = torch.compile(self.model)", "compile"
        )
    arguments = list_trainer_arguments(choice, target_strategy)
    optimizers = ["def configure_optimizers(self):  # of your LightningModule"]
    optimizers.append(f"    optimizer = {format_optimizer_call(choice, 'self.parameters()')}")
    schedule = format_lr_schedule_lines(choice)
    if schedule:
        imports.insert(0, "import math")
        optimizers += [
            "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)",
            "    return [optimizer], [{'scheduler': schedule, 'interval': 'step'}]",
        ]
    else:
        optimizers.append("    return optimizer")
    choice.add_file_comment(
        f"in the script, DataLoader(batch_size={choice.micro_batch_size}, drop_last=True)",
        *("global_batch", "per_worker_batch"),
    )
    add_training_length_and_data_comments(choice, comments_on_length=False)
    switches = []
    if s.precision in ("fp32", "tf32") and choice.device_type == "cuda":
        value = s.precision == "tf32"
        switches = [f"torch.backends.cuda.matmul.allow_tf32 = {value}"]
        switches.append(f"torch.backends.cudnn.allow_tf32 = {value}")
    freeing = [] if target_strategy == "DeepSpeedStrategy" else list(FREE_GRADIENTS)
    blocks = [imports, switches, schedule, model, optimizers, freeing]
    body = "\n\n".join("\n".join(map(wrap_long_call_line, lines)) for lines in blocks if lines)
    head = format_comment_lines(
        [
            *choice.cell_comments,
            "start: python train.py (Lightning starts the others)",
            *choice.file_comments,
        ]
    )
    return f"{head}\n{body}\n\nstrategy = {strategy}" + format_python_call(
        "trainer = Trainer", arguments
    )


def list_trainer_arguments(choice: ChosenCell, target_strategy: str) -> dict[str, Any]:
    """Return the keyword arguments of Lightning's Trainer."""
    s = choice.settings
    arguments: dict[str, Any] = {
        "accelerator": "cpu" if choice.device_type == "cpu" else "gpu",
        "devices": choice.workers_per_node,
        "num_nodes": choice.num_nodes,
        "strategy": UnquotedCode("strategy"),
        "precision": PRECISION.get(choice.get_setting_to_write("precision"), "32-true"),
        "accumulate_grad_batches": choice.get_setting_to_write("gradient_accumulation_steps"),
        # By default Lightning writes a checkpoint at the end, which adds to the peak memory.
        "enable_checkpointing": False,
    }
    choice.mark_as_written("gpus")
    by_itself = choice.options.get("mixed_precision") == "policy"
    if s.precision == "bf16-true":
        if target_strategy != "DeepSpeedStrategy":
            choice.add_file_comment("in training_step, the loss of outputs.float()", "precision")
    elif target_strategy == "DeepSpeedStrategy" or by_itself:
        # The Trainer must not use mixed precision, because the strategy itself does.
        arguments["precision"] = "32-true"
    elif target_strategy == "ModelParallelStrategy" and s.precision in ("fp16", "fp64"):
        arguments["precision"] = "32-true"
        choice.add_file_comment(
            "ModelParallelStrategy does not take it from the Trainer: do it in training_step",
            "precision",
        )
    if (
        norm := choice.get_setting_to_write("max_grad_norm")
    ) is not None and target_strategy != "DeepSpeedStrategy":
        arguments["gradient_clip_val"] = norm
    sync = choice.get_option_to_write("gradient_sync")
    if s.gradient_accumulation_steps > 1 and sync == "last-part":
        choice.add_file_comment(
            "Lightning reduces gradients with each part; the cell did with the last",
            "gradient_sync",
        )
    elif s.gradient_accumulation_steps > 1 and sync is not None:
        choice.add_file_comment("Lightning reduces gradients with each part, too", "gradient_sync")
    epochs, steps = choice.get_setting_to_write("epochs"), choice.get_setting_to_write("steps")
    return arguments | ({"max_steps": steps} if steps else {"max_epochs": epochs})


def format_ddp_strategy_call(choice: ChosenCell, imports: list[str]) -> str:
    """Return the code that creates Lightning's DDP strategy, and extend `imports`."""
    arguments, hook = list_ddp_arguments(choice), choose_communication_hook_name(choice)
    if hook is not None:
        module = "powerSGD_hook" if hook == "powerSGD_hook" else "default_hooks"
        imports.append(f"from torch.distributed.algorithms.ddp_comm_hooks import {module}")
        arguments["ddp_comm_hook"] = UnquotedCode(f"{module}.{hook}")
        if module == "powerSGD_hook":
            arguments["ddp_comm_state"] = UnquotedCode(format_powersgd_state_call(choice))
    return format_python_call("DDPStrategy", arguments)


def format_configure_model_method(choice: ChosenCell, imports: list[str]) -> list[str]:
    """Return the code of a LightningModule's method that shards `self.model` by FSDP2."""
    s = choice.settings
    mixed = choice.get_option_to_write("mixed_precision")
    lines, needed = format_sharding_code(choice, "self.model", mixed == "policy")
    imports += needed
    if choice.shard_group_size < s.gpus:
        choice.add_file_comment(
            "Lightning's mesh has one dimension of data parallelism, and no groups: here all workers hold "
            "one model between them",
            "shard_group_size",
        )
    if mixed == "autocast" and s.precision in ("bf16", "fp16"):
        choice.add_file_comment("torch.autocast by the Trainer, as in the cell", "mixed_precision")
    return [
        "def configure_model(self):  # of your LightningModule, whose network is self.model",
        "    mesh = self.device_mesh['data_parallel']",
        *(f"    {line}" for line in lines),
    ]
