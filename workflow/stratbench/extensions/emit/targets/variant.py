"""Writes a cell as blocks `variants` and `experiments` of config.yaml, for `--to variant`."""

from __future__ import annotations

from dataclasses import MISSING, fields

import yaml

from stratbench.cell.extensions import iter_extension_keys
from stratbench.cell.settings import GIVEN, OF_A_VARIANT, Settings
from stratbench.extensions.emit.choice import ChosenCell, format_comment_lines
from stratbench.strategies import get_option_defaults


def format_target_file(choice: ChosenCell, target_strategy: str) -> str:
    """Return the cell as blocks `variants` and `experiments` of a study in config.yaml.

    Args:
        choice: The cell.
        target_strategy: Unused.
    """
    s, cell = choice.settings, choice.cell
    defaults = get_option_defaults(s.strategy)
    options = {
        key: value for key, value in choice.options.items() if value != defaults.get(key, MISSING)
    }
    # stratbench itself adds the hash of a command's files when it reads config.yaml.
    options.pop("sha256", None)
    variants = {cell.strategy: {"strategy": s.strategy, **options}}
    default = {f.name: f.default for f in fields(Settings)}
    settings = {
        key: value for key in GIVEN if (value := choice.get_setting_to_write(key)) != default[key]
    }
    for _, keys in iter_extension_keys("experiment"):
        block = s.more.get(keys.extension, {})
        settings |= {
            f.name: block[f.name] for f in fields(keys) if f.name in block and f.metadata["given"]
        }
    if s.optimizer == "adamw":
        settings.pop("momentum", None)
    if cell.strategy != s.strategy and (
        own := {k: settings.pop(k) for k in OF_A_VARIANT if k in settings}
    ):
        variants[cell.strategy]["settings"] = own
    experiment = {
        "dataset": s.dataset,
        "strategies": [cell.strategy],
        "models": [s.model],
        "gpus": [choice.get_setting_to_write("gpus")],
        "global_batch": choice.get_setting_to_write("global_batch"),
        **settings,
    }
    blocks = {"experiments": {"chosen": experiment}}
    if options or cell.strategy != s.strategy:
        blocks = {"variants": variants, **blocks}
    choice.add_file_comment("of this repeat; the study's own seed makes it", "seed")
    for what, spec in (("models", s.own_model), ("datasets", s.data_spec)):
        if spec is not None:
            name = s.model if what == "models" else s.dataset
            choice.add_file_comment(f"{what}.{name} of config.yaml stays as it is")
    if s.own_task is not None:
        experiment["task"] = s.own_task["call"]
    choice.mark_as_written("per_worker_batch", *choice.options)
    head = format_comment_lines(
        [
            *choice.cell_comments,
            "put it below `studies: NAME:` of config.yaml",
            *choice.file_comments,
        ]
    )
    return head + yaml.safe_dump(blocks, sort_keys=False)
