"""Tells the Snakemake rules which blocks and full runs one round of a verdict runs.

At its start, the workflow runs a command that prints the next round as JSON. The jobs of the round read this
JSON from a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.files import read_json, write_text_atomically
from stratbench.extensions.verdict.block_rules import MAX_STEPS, count_discarded_steps
from stratbench.extensions.verdict.blocks import (
    BLOCK_FILE,
    BLOCK_PATTERN,
    BlockPlan,
    ComparisonKey,
    hash_trained_settings,
    remove_length_and_seed,
)
from stratbench.strategies import make_strategy
from stratbench.study.config.config import Study
from stratbench.study.config.messages import ConfigError
from stratbench.study.jobs import Jobs
from stratbench.study.resources import (
    UNLIMITED_MIN,
    JobRequest,
    combine_requests,
)

#: Seconds that the processes of a segment may take to start and to end.
SEGMENT_ALLOWANCE_S = 180


class Round:
    """One round of a verdict.

    Its properties are computed on first use, because most runs of the workflow need none of them.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        study: Study,
        jobs: Jobs,
        command: Sequence[str],
        is_job: bool,
    ) -> None:
        """Prepare a round, which `command` prints as JSON.

        Args:
            config: The validated config.
            study: The study.
            jobs: Jobs of the study.
            command: Prints the next round, given the config.
            is_job: Whether this process runs a job of the round, and so must not choose another round.
        """
        self.config, self._study, self._jobs = config, study, jobs
        self._command, self._is_job = command, is_job
        self.file = Path(jobs.results, study.name, "verdict", "round.json")

    @cached_property
    def content(self) -> dict[str, Any]:
        """Content of round.json. A job reads the file; other processes run the command.

        Raises:
            ConfigError: A job cannot read the file, or the command fails.
        """
        if not self._is_job:
            return self._run_next_round_command()
        try:
            return read_json(self.file)
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"{self.file} cannot be read: {e}; start the round with `snakemake verdict`"
            ) from None

    def write_round_file(self) -> None:
        """Write round.json, which the jobs of the round read."""
        write_text_atomically(self.file, json.dumps(self.content, indent=1) + "\n")

    @cached_property
    def blocks(self) -> dict[str, BlockPlan]:
        """Plans of the round's blocks, by path below `blocks/`."""
        plans = [
            BlockPlan.from_round_entry(self._study.name, entry)
            for entry in self.content["comparisons"]
        ]
        return {plan.relative_path: plan for plan in plans}

    @cached_property
    def full_runs(self) -> list[Cell]:
        """Cells that the round trains in full, and not in blocks."""
        cells = [Cell(**coordinates) for coordinates in self.content["full_runs"]]
        return [cell for cell in cells if cell.path not in self._jobs.skip_reasons]

    def list_files(self) -> list[str]:
        """Return the paths of the round's files: block.json files, and records of full runs."""
        results = self._jobs.results
        made = [plan.get_result_folder(results) / BLOCK_FILE for plan in self.blocks.values()]
        return [str(p) for p in (*made, *(cell.record_path(results) for cell in self.full_runs))]

    def get_block_plan(self, wildcards: Mapping[str, str]) -> BlockPlan:
        """Return the plan of the block that the wildcards of a Snakemake job name.

        Raises:
            ConfigError: The block is not in this round.
        """
        path = BLOCK_PATTERN.format(**wildcards)
        if path not in self.blocks:
            raise ConfigError(
                f"the block {path} is not in the verdict's current round; run `snakemake verdict` to run the "
                "blocks of this round"
            )
        return self.blocks[path]

    def get_cell_settings(self, plan: BlockPlan) -> dict[str, dict[str, Any]]:
        """Return the settings of the cell of each strategy in a block, by strategy."""
        settings = {
            name: self._jobs.resolve_settings(plan.make_segment_cell(name)) for name in plan.order
        }
        return {name: json.loads(s.as_json()) for name, s in settings.items()}

    def get_settings_in_common(self, plan: BlockPlan) -> dict[str, dict[str, Any]]:
        """Return the settings that are equal in segments and full runs, by strategy."""
        return {
            name: remove_length_and_seed(self._jobs.resolve_settings(plan.make_segment_cell(name)))
            for name in plan.order
        }

    def compute_segment_time_limit_s(self, plan: BlockPlan) -> float | None:
        """Return the time limit of each segment in seconds, or None for no limit."""
        cell = plan.make_segment_cell(plan.order[0])
        samples = self._study.get_dataset(plan.dataset).train_samples
        total = self._jobs.resolve_settings(cell).count_steps(samples) if samples else None
        longest = max(
            self._count_segment_steps(plan.make_segment_cell(name), plan.steps)
            for name in plan.order
        )
        return compute_segment_limit_s(self._study.time_limit_s(cell), longest, total)

    def _count_segment_steps(self, cell: Cell, steps: int | None) -> int:
        """Return the number of steps of a segment, discarded and timed ones together.

        Args:
            cell: Cell of the segment.
            steps: Number of timed steps; None for the largest number.
        """
        timed, settings = steps or MAX_STEPS, self._jobs.resolve_settings(cell)
        strategy = make_strategy(settings.strategy, settings.options)
        return sum(strategy.choose_discarded_and_timed_steps(count_discarded_steps(timed), timed))

    def make_block_request(self, plan: BlockPlan) -> JobRequest:
        """Return the resources that a block's job requests: the maximum over the block's strategies."""
        cells = [plan.make_segment_cell(name) for name in plan.order]
        minutes = compute_block_limit_minutes(
            self.compute_segment_time_limit_s(plan), len(cells), self.config["cluster"]
        )
        return combine_requests(map(self._jobs.build_job_request, cells), minutes)

    def is_followed_by_round(self) -> bool:
        """Return whether another round follows, if all files of this round exist.

        Raises:
            ConfigError: The next round would be the same, because the files of this round are not used.
        """
        following = self._run_next_round_command()
        if following["done"]:
            return False
        if all(following[key] == self.content[key] for key in ("comparisons", "full_runs")):
            raise ConfigError(
                "all files of this round of the verdict exist, but the verdict does not use all of them, so "
                "the next round would repeat this one; run `snakemake verdict` to see which files are not "
                "used, and why"
            )
        return True

    def _run_next_round_command(self) -> dict[str, Any]:
        """Return the next round, from the output of the command that prints it.

        Raises:
            ConfigError: The command failed; the message is the command's.
        """
        command, text = [*self._command, "--config", "-"], json.dumps(self.config)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(
                f"the command that plans the next round of the verdict failed:\n{done.stderr.strip()}"
            )
        return json.loads(done.stdout)

    @cached_property
    def has_current_verdict(self) -> bool:
        """Whether verdict.json exists, and its strategies still have the same settings in the config."""
        try:
            comparisons = read_json(self.file.with_name("verdict.json"))["comparisons"]
            trained = {
                (ComparisonKey.from_cell(b), strategy): of
                for b in comparisons
                for strategy, of in b["trained"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        now = {
            (ComparisonKey.from_cell(cell), cell.strategy): self._jobs.resolve_settings(cell)
            for cell in self._study.cells
            if cell.repeat == 0
        }
        unchanged = all(
            hash_trained_settings(now[strategy]) == of
            for strategy, of in trained.items()
            if strategy in now
        )
        if not unchanged:
            print(
                "verdict.json is not used: its strategies were trained with other settings than those in the "
                "config; `snakemake verdict` makes a new one",
                file=sys.stderr,
            )
        return unchanged


def compute_segment_limit_s(
    cell_limit_s: float | None, segment_steps: int, cell_steps: int | None
) -> float | None:
    """Return a segment's time limit: SEGMENT_ALLOWANCE_S plus its share of the cell's limit.

    The share is the segment's share of the steps of the cell. Return None if the cell has no limit.

    Args:
        cell_limit_s: Limit of the cell, if any.
        segment_steps: Steps of the segment.
        cell_steps: Steps of the cell, if known.
    """
    if cell_limit_s is None:
        return None
    share = min(1.0, segment_steps / cell_steps) if cell_steps else 1.0
    return SEGMENT_ALLOWANCE_S + share * cell_limit_s


def compute_block_limit_minutes(
    segment_limit_s: float | None, num_strategies: int, cluster: Mapping[str, Any]
) -> int:
    """Return the time limit that a block's job requests from the scheduler, in minutes.

    The block has time for one segment of each strategy, and for the burn-in segment, at their limit.

    Args:
        segment_limit_s: Time limit of a segment in seconds, or None without limit.
        num_strategies: Number of strategies.
        cluster: The `cluster` block of the config.
    """
    if segment_limit_s is None:
        return UNLIMITED_MIN
    return -(-int((num_strategies + 1) * segment_limit_s + cluster["startup_allowance_s"]) // 60)
