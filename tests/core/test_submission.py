"""Refusals by sbatch: which pass, and when the job is submitted again."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratbench.study.slurm import submission
from stratbench.study.slurm.submission import SILENCE_S, Postponed

REFUSED = """SLURM sbatch failed. \
The error message was 'sbatch: error: CPU count per node can not be satisfied
sbatch: error: Batch job submission failed: Requested node configuration is not available'.
    sbatch call:
        sbatch --parsable --export=ALL --job-name 1 --wrap="/usr/bin/python3 -m snakemake ..."
For further error details see the cluster/cloud log and the log files of the involved rule(s)."""


def test_the_reason_of_a_refusal_is_read_from_the_plugins_report():
    assert submission.parse_sbatch_refusal(REFUSED) == (
        "CPU count per node can not be satisfied; Batch job submission failed: Requested node "
        "configuration is not available"
    )
    assert submission.parse_sbatch_refusal("SLURM-job '7' failed") is None


def test_the_plugin_reports_a_refusal_in_these_words():
    """As pinned in envs/: the executor reads the plugin's report."""
    plugin = pytest.importorskip("snakemake_executor_plugin_slurm")
    source = Path(plugin.__file__).read_text()
    assert '"SLURM sbatch failed. "\n' in source
    assert "f\"The error message was '{e.output.strip()}'.\\n\"" in source


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        # As SLURM's programs and its public reports have them.
        ("Batch job submission failed: Socket timed out on send/recv operation", "silence"),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", "silence"),
        ("Slurm temporarily unable to accept job, sleeping and retrying", "silence"),
        ("slurm_persist_conn_open_without_init: failed to open persistent connection", "silence"),
        ("Batch job submission failed: Unexpected message received", "silence"),
        ("Batch job submission failed: Zero Bytes were transmitted or received", "silence"),
        ("Batch job submission failed: Resource temporarily unavailable", "silence"),
        ("AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS policy "
         "(job submit limit, user's size and/or time limits)", "limit"),
        ("QOSMaxSubmitJobPerUserLimit", "limit"),
        ("AssocGrpSubmitJobsLimit", "limit"),
        ("QOSGrpSubmitJobsLimit", "limit"),
        ("Batch job submission failed: Invalid partition name specified", None),
        ("Batch job submission failed: Requested node configuration is not available", None),
        ("Batch job submission failed: Invalid account or account/partition combination", None),
        ("Batch job submission failed: Requested time limit is invalid (exceeds some limit)", None),
    ],
)  # fmt: skip
def test_refusals_that_pass_are_told_from_those_that_stay(printed, kind):
    assert submission.classify_refusal(printed) == kind


def test_pauses_grow_while_slurm_refuses_and_end_with_the_next_success():
    waits = Postponed()
    now, pauses = 100.0, []
    for _ in range(6):
        waits.add_refused_job("job", "silence", now)
        assert waits.is_submission_paused(now)
        pauses.append(waits.next_submission_at_s - now)
        now = waits.next_submission_at_s
        assert not waits.is_submission_paused(now)
    assert pauses == [5, 10, 20, 40, 60, 60]
    waits.add_refused_job(
        "another", "silence", now - 1
    )  # refused meanwhile: no longer pause for that
    assert waits.next_submission_at_s == now
    waits.end_pause()
    assert not waits.is_submission_paused(0.0)
    waits.add_refused_job("job", "silence", now)
    assert waits.next_submission_at_s == now + 5


def test_silence_ends_after_ten_minutes_and_a_limit_never():
    waits = Postponed()
    waits.add_refused_job("job", "silence", 0.0)
    assert not waits.has_waited_too_long(SILENCE_S - 1)
    assert waits.has_waited_too_long(SILENCE_S)
    waits.add_refused_job("job", "limit", SILENCE_S)  # SLURM has answered
    assert not waits.has_waited_too_long(10 * SILENCE_S)
