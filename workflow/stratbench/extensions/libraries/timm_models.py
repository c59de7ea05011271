"""Checks timm models that config.yaml names. It reads timm's files and does not import timm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from stratbench.extensions.libraries.package_files import (
    describe_missing_package,
    find_package_folder,
    format_name_suggestion,
)
from stratbench.workload.network.libraries import Library

CALL = "timm:create_model"


class Timm(Library):
    """The library timm. An entry of `models` in config.yaml names a model in timm's registry."""

    def make_builder_call_entry(
        self, model_entry: Mapping[str, Any], hash_cache: Path
    ) -> dict[str, Any]:
        """Return the call of `timm.create_model`, as a dict with its function and its arguments."""
        for key in ("weights", "lora"):
            if key in model_entry:
                raise ValueError(
                    f".{key}: is a key of models of transformers, not of timm; remove it"
                )
        return {
            "call": CALL,
            "kwargs": {"model_name": model_entry["timm"], **model_entry.get("arguments", {})},
        }

    def invalid_call_reason(self, model_entry: Mapping[str, Any]) -> str | None:
        """Return why timm cannot build the model, or None if it can. timm is not imported."""
        folder = find_package_folder("timm")
        if folder is None:
            return describe_missing_package("timm")
        name = model_entry["kwargs"].get("model_name") if model_entry["call"] == CALL else None
        if not isinstance(name, str):
            return None
        known = _read_timm_model_names(folder)
        # The part of the name after a dot names the pretrained weights.
        network = name.partition(".")[0]
        if not known or network in known or ":" in name:
            return None
        return f"timm has no {network!r}{format_name_suggestion(network, known)}"

    def get_entry_task(self, model_entry: Mapping[str, Any]) -> str | None:
        """Return the task of all timm models, which is classification."""
        return "classification"

    def collect_data_arguments(
        self, kwargs: Mapping[str, Any], data_values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments that follow from the data: channels, and the size for fixed-size models."""
        if "channels" not in data_values:
            return {}
        import timm

        name = kwargs.get("model_name")
        config = timm.get_pretrained_cfg(name, allow_unregistered=True) if name else None
        is_fixed = config is not None and config.fixed_input_size
        return {"in_chans": data_values["channels"]} | (
            {"img_size": data_values["size"]} if is_fixed else {}
        )


@cache
def _read_timm_model_names(folder: Path) -> frozenset[str]:
    texts = (p.read_text(encoding="utf-8") for p in folder.glob("models/*.py"))
    pattern = re.compile(r"^@register_model\n(?:@.*\n)*def (\w+)", re.M)
    return frozenset(name for text in texts for name in pattern.findall(text))
