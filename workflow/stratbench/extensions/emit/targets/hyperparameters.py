"""Writes the optimizer, learning rate and other hyperparameters as PyTorch code or comments."""

from __future__ import annotations

from typing import Any

from stratbench.extensions.emit.choice import ChosenCell

#: Code of autocast's dtype for each `precision` that is mixed precision.
AUTOCAST = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
#: Argument of PyTorch's optimizers for each value of the setting `optimizer_impl`.
IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def get_optimizer_class_and_arguments(choice: ChosenCell) -> tuple[str, dict[str, Any]]:
    """Return the optimizer's class name in `torch.optim`, and its arguments except the parameters."""
    kind, lr = choice.get_setting_to_write("optimizer"), choice.get_setting_to_write("lr")
    keys = ("betas", "eps") if kind == "adamw" else ("momentum", "nesterov")
    choice.mark_as_written("betas", "eps", "momentum", "nesterov")
    s = choice.settings
    arguments = {"lr": lr, "weight_decay": choice.get_setting_to_write("weight_decay")}
    arguments |= {key: getattr(s, key) for key in keys}
    if kind == "adamw":
        arguments["betas"] = tuple(arguments["betas"])
    arguments |= IMPLEMENTATIONS[find_optimizer_implementation(choice)]
    return ("AdamW" if kind == "adamw" else "SGD"), arguments


def find_optimizer_implementation(choice: ChosenCell) -> str:
    """Return the implementation of the optimizer that the cell ran: fused, foreach or for-loop."""
    implementation, on_gpu = (
        choice.get_setting_to_write("optimizer_impl"),
        choice.device_type == "cuda",
    )
    on_gpu = on_gpu and choice.options.get("offload") != "cpu"
    if implementation == "fused" and choice.settings.optimizer == "sgd" and not on_gpu:
        return "for-loop"
    return implementation


def format_optimizer_call(choice: ChosenCell, parameters_code: str = "model.parameters()") -> str:
    """Return the code of the call that creates the optimizer."""
    kind, arguments = get_optimizer_class_and_arguments(choice)
    keywords = "".join(f", {key}={value!r}" for key, value in arguments.items())
    return f"torch.optim.{kind}({parameters_code}{keywords})"


def format_lr_schedule_lines(choice: ChosenCell) -> list[str]:
    """Return code lines of a function that computes a step's learning rate relative to `lr`.

    The list is empty if the learning rate is constant.
    """
    schedule, warmup, final = map(
        choice.get_setting_to_write, ("schedule", "lr_warmup_steps", "final_lr")
    )
    if not choice.settings.has_changing_lr:
        return []
    lines = ["def share_of_lr(step):"]
    if warmup:
        lines += [f"    if step < {warmup}:", f"        return (step + 1) / {warmup}"]
    if schedule == "constant":
        return [*lines, "    return 1.0"]
    length = max(1, choice.total_steps - warmup)
    lines.append(f"    done = min(1.0, (step - {warmup}) / {length})")
    falls = "(1 + math.cos(math.pi * done)) / 2" if schedule == "cosine" else "(1 - done)"
    if not final:
        return [*lines, f"    return {falls}"]
    return [
        *lines,
        f"    low = {final!r} / {choice.settings.lr!r}",
        f"    return low + (1 - low) * {falls}",
    ]


def add_script_comments(choice: ChosenCell, accumulation_text: str) -> None:
    """Add comments on what the user's training script has to do itself with Accelerate.

    `accumulation_text` is how the script accumulates gradients over micro-batches.
    """
    s = choice.settings
    choice.add_file_comment(
        f"in the script, {format_optimizer_call(choice)}",
        *("optimizer", "lr"),
    )
    choice.add_file_comment(f"in the script, DataLoader(batch_size={choice.micro_batch_size}) on each worker",
                "global_batch", "per_worker_batch")  # fmt: skip
    if choice.get_setting_to_write("gradient_accumulation_steps") > 1:
        choice.add_file_comment(accumulation_text, "gradient_accumulation_steps")
    if s.max_grad_norm is not None:
        choice.add_file_comment(
            f"in the script, accelerator.clip_grad_norm_(model.parameters(), {s.max_grad_norm})",
            "max_grad_norm",
        )
    if lines := format_lr_schedule_lines(choice):
        text = "; ".join(line.strip() for line in lines)
        choice.add_file_comment(
            f"in the script, LambdaLR(optimizer, share_of_lr), a step per update, with {text}",
            *("schedule", "lr_warmup_steps", "final_lr"),
        )
    add_training_length_and_data_comments(choice)


def add_training_length_and_data_comments(
    choice: ChosenCell, comments_on_length: bool = True
) -> None:
    """Add comments on the training's length, loss, data, seed and threads."""
    s = choice.settings
    add_loss_chunks_comment(choice)
    for key in ("epochs", "steps"):
        if comments_on_length and choice.get_setting_to_write(key) is not None:
            choice.add_file_comment(f"the cell's length, {choice.total_steps} steps in all", key)
    choice.add_file_comment("of weights and of the order of samples", "seed")
    if s.augment:
        choice.add_file_comment(
            "the data set's own random crops and flips, on the device", "augment"
        )
    if choice.get_setting_to_write("data_placement") == "host":
        choice.add_file_comment(
            "batches came from host memory, one fetched ahead", "data_placement"
        )
    else:
        choice.add_file_comment(
            "the data set lay on each worker's device; a DataLoader takes longer", "data_placement"
        )
    shape = choice.record["model"].get("input_shape") or ()
    if choice.device_type == "cuda" and len(shape) == 3:
        choice.add_file_comment("the cell set torch.backends.cudnn.benchmark = True")
        if s.precision in ("bf16", "fp16", "tf32"):
            choice.add_file_comment("the cell's batches were in torch.channels_last")
    if s.threads is not None:
        choice.add_file_comment(f"start with OMP_NUM_THREADS={s.threads}", "threads")
    if s.slowdown is not None:
        choice.add_file_comment(
            "the cell slowed workers on purpose; this file does not", "slowdown"
        )


def add_precision_comment(choice: ChosenCell) -> None:
    """Add a comment on how the script sets a `precision` that is not mixed precision."""
    precision = choice.get_setting_to_write("precision")
    if precision == "tf32":
        choice.add_file_comment(
            "in the script, torch.backends.cuda.matmul.allow_tf32 = True and "
            "torch.backends.cudnn.allow_tf32 = True",
            "precision",
        )
    elif precision == "fp64":
        choice.add_file_comment("in the script, model.double() and batches in float64", "precision")
    elif precision == "bf16-true":
        add_pure_bf16_comment(choice)
    elif precision == "fp32":
        choice.add_file_comment("no mixed precision", "precision")


def add_pure_bf16_comment(choice: ChosenCell) -> None:
    """Add a comment that the script has to convert the model to bfloat16."""
    choice.add_file_comment(
        "in the script, model.to(torch.bfloat16) before the optimizer is made, and the loss of "
        "outputs.float()",
        "precision",
    )


def add_loss_chunks_comment(choice: ChosenCell) -> None:
    """Add a comment on `loss_chunks` if the cell computed the loss in chunks of positions."""
    if choice.get_setting_to_write("loss_chunks") > 1:
        choice.add_file_comment(
            "the cell computed the last layer and the loss in so many parts of the positions, each under "
            "torch.utils.checkpoint; without it the loss is the same, and takes the memory of all scores",
            "loss_chunks",
        )


def add_missing_cpu_support_comment(choice: ChosenCell, engine: str, missing_feature: str) -> None:
    """Add a comment on an engine's missing feature if the cell ran on CPU processes.

    Args:
        choice: The cell.
        engine: Name of the engine, such as Accelerate.
        missing_feature: Feature that the engine does not have on CPUs, such as FSDP.
    """
    if choice.device_type == "cpu":
        choice.add_file_comment(
            f"the cell ran on CPU processes, where {engine} has no {missing_feature}: use it on GPUs"
        )
