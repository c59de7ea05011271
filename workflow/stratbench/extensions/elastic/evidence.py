"""Adds to decisions for how long the workers of elastic cells had a GPU allocated."""

from __future__ import annotations

import numpy as np

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.evidence import Evidence
from stratbench.analysis.records.groups import Group, Repeats
from stratbench.analysis.records.reading import Reading


class PresenceEvidence(Evidence):
    """Evidence for a decision on how long elastic workers had a GPU allocated."""

    def replace_measured_times(self, candidate: Candidate, groups: Repeats, group: Group) -> None:
        """Set a candidate's GPU-seconds and mean number of present workers, if its records have them.

        Args:
            candidate: Candidate of the decision.
            groups: All groups of repeats.
            group: The group of the candidate's repeats.
        """
        columns = ("allocated_s", "idle_s", "train_time_s")
        values = [list(groups.values(group, name).values()) for name in columns]
        if all(values):
            held_s, idle_s, time_s = map(np.mean, values)
            candidate.allocated_gpu_s = float(held_s)
            candidate.mean_num_workers = float((held_s - idle_s) / time_s)


READING = Reading(read_evidence=lambda path, constraints: PresenceEvidence())
