"""Makes the DeepSpeed config of a cell, which several emitted files contain or refer to."""

from __future__ import annotations

from typing import Any

from stratbench.extensions.deepspeed.strategy import make_engine_config
from stratbench.extensions.emit.choice import ChosenCell


def make_deepspeed_config(choice: ChosenCell) -> dict[str, Any]:
    """Return the DeepSpeed config, and add comments on settings that it cannot contain."""
    s, trained = choice.settings, choice.record["model"]["trainable_parameters"]
    choice.mark_as_written(
        *("per_worker_batch", "gradient_accumulation_steps", "max_grad_norm", "precision"),
        "global_batch",
    )
    bucket = choice.get_option_to_write("bucket_cap_mb", 25)
    match_other_strategies = choice.get_option_to_write("match_other_strategies", True)
    stage = choice.get_option_to_write("stage", 1)
    config = make_engine_config(stage, match_other_strategies, bucket, s, trained)
    config["train_batch_size"] = s.global_batch
    if s.precision == "bf16-true":
        config["bf16"] = {"enabled": True}
        choice.add_file_comment(
            "in the script, the loss of outputs.float(); DeepSpeed updates a float32 copy of the weights: "
            "more memory than the cell's, and less rounding",
            "precision",
        )
    elif s.precision not in ("fp32", "bf16"):
        choice.add_file_comment(
            "DeepSpeed keeps float32 weights here; set this in the script", "precision"
        )
    if choice.device_type == "cpu":
        choice.add_file_comment("start with DS_ACCELERATOR=cpu, as the cell ran on CPU processes")
    if s.strategy != "deepspeed":
        choice.add_file_comment(
            f"the cell ran stratbench's {s.strategy}, which DeepSpeed's stage 1 comes closest to: it sends "
            "half as much again and keeps a copy of each worker's part of the weights"
        )
        for key in [key for key in choice.options if key != "bucket_cap_mb"]:
            choice.add_file_comment("DeepSpeed has no such option", key)
    elif stage == 3 and match_other_strategies:
        choice.add_file_comment(
            "the cell set stage3_prefetch_bucket_size to the parameters of its largest block, and "
            "stage3_max_live_parameters to twice as many; set them for your network"
        )
    return config
