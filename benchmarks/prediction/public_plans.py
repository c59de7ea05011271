"""Plans single configurations by the plan's own functions, in one process that shares footprints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from stratbench.extensions.plan.check import (
    CheckResult,
    DryRun,
    Network,
    StudyCheck,
    make_footprint_or_error,
)
from stratbench.extensions.plan.footprint.drawn_out import TraceMismatchError
from stratbench.extensions.plan.footprint.few_parts import (
    FEW,
    MORE,
    extrapolate_gradient_accumulation,
)
from stratbench.extensions.plan.footprint.footprint import Footprint
from stratbench.extensions.plan.footprint.processes import prepare_pool_process
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.needs import CellToPlan, make_cell_to_plan
from stratbench.extensions.plan.schedule import PlannedCell, make_plan
from stratbench.study.config.config import Study, load_config

HERE = Path(__file__).parent
#: Samples of the data sets: more than a step of any configuration takes.
SAMPLES = 1 << 16


@cache
def read_configurations() -> dict[str, Any]:
    """Return models and configurations of public_gpus.yaml, as parts of a config.yaml."""
    return yaml.safe_load((HERE / "public_gpus.yaml").read_text(encoding="utf-8"))


class Planner:
    """Plans configurations of `models`, which are entries of a config.yaml.

    `blocks_of`: returns path and number of the equal blocks by which a request's network is drawn out; None
    where all of it is followed. `footprints`: those made so far, or the sentence that says why there is none,
    by request.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        blocks_of: Callable[[Request], tuple[str, int] | None] = lambda request: None,
    ):
        prepare_pool_process()
        torch.set_num_threads(1)
        self.models, self.blocks_of = dict(models), blocks_of
        self.footprints: dict[Request, Footprint | str] = {}

    def plan(self, c: Mapping[str, Any]) -> PlannedCell:
        """Return the plan of a configuration: model, data, variant, experiment and cluster."""
        config, study, subject = self.subject(c)
        request, made = subject.request, self.footprint(subject.request)
        followed = {"unpredicted": made} if isinstance(made, str) else {"footprint": made}
        dry_runs, networks = (
            {request: DryRun(**followed)},
            {Network.from_request(request): CheckResult()},
        )
        checked = StudyCheck(study, [subject], networks, dry_runs, {}, {})
        (planned,) = make_plan(config, checked, {}).cells
        return planned

    def subject(self, c: Mapping[str, Any]) -> tuple[dict[str, Any], Study, CellToPlan]:
        """Return the config of a configuration's study, the study, and its one cell before the plan."""
        config, study = load_config(self._config(c))
        (cell,) = study.cells
        return config, study, make_cell_to_plan(config, study, cell)

    def footprint(self, request: Request) -> Footprint | str:
        """Return the footprint of a request, or why there is none; made once."""
        if request not in self.footprints:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.footprints[request] = self._footprint(request)
        return self.footprints[request]

    def _footprint(self, request: Request) -> Footprint | str:
        if request.gradient_accumulation_steps > FEW + MORE:
            with suppress(TraceMismatchError):  # steps in many parts share those in few
                return extrapolate_gradient_accumulation(request, self._few_parts)
        return make_footprint_or_error(request, None, self.blocks_of(request))

    def _few_parts(self, request: Request) -> Footprint:
        made = self.footprint(request)
        if isinstance(made, str):
            raise TraceMismatchError(made)
        return made

    def _config(self, c: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.yaml of a study that has this one cell, of a single step."""
        is_text = "sequence" in c["data"]
        source = {"source": "markov-text" if is_text else "synthetic"}
        experiment = dict(c["experiment"])
        samples = {"train_samples": SAMPLES, "test_samples": 64}
        own = {c["model"]: self.models[c["model"]]} if c["model"] in self.models else {}
        return {
            "study": "public",
            "code": [str(HERE)],
            "models": own,
            "datasets": {"data": source | samples | c["data"]},
            "cluster": {"gpus_per_node": 8} | c["cluster"],
            "studies": {
                "public": {
                    "variants": {"planned": c["variant"]},
                    "experiments": {
                        "run": experiment
                        | {
                            "dataset": "data",
                            "strategies": ["planned"],
                            "models": [c["model"]],
                            "gpus": [experiment["gpus"]],
                            "steps": 1,
                            "lr": 0.001,
                            "device": "cuda",
                            "data_placement": "host",
                        }
                    },
                }
            },
        }
