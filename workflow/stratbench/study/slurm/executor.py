"""Follows a run's jobs on SLURM: retries submissions, and finds each job's outcome.

Snakemake's SLURM plugin loses all jobs when one request for their states fails. It fails a cell at once when
SLURM is busy, waits forever for a preempted job, and reports a cell that ran out of memory as a crash.
`JobFollower` overrides methods that Snakemake's executor interface documents; the plugin does the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from stratbench.cell.text.help_page import format_help_address
from stratbench.cell.text.words import format_count
from stratbench.study.slurm import job_states, submission
from stratbench.study.slurm.commands import read_command_output, run_slurm_command
from stratbench.study.slurm.followed import (
    ENDS,
    FollowedRun,
    get_first_output,
    read_file_signatures,
)
from stratbench.study.slurm.job_states import JobState
from stratbench.study.slurm.live_jobs import make_job_comment, print_to_stderr
from stratbench.study.slurm.unstarted_jobs import explain_unstarted_rule
from stratbench.study.slurm.waiting import describe_progress
from stratbench.study.snakemake_internals import exclude_nodes, extend_executor, fail_job_silently

#: Seconds between two requests for the states of all jobs: after a job has ended, and the maximum.
FIRST_LOOK_S, MAX_LOOK_S = 5.0, 60.0
#: Period in seconds at which a waiting executor checks whether Snakemake ends.
WAKE_S = 0.5
#: Seconds without an answer of SLURM after which the user gets a message.
UNANSWERED_S = 120.0
#: Seconds without another message after which a line shows the progress of the run.
PROGRESS_S = 600.0
#: A job has ended if all of SLURM's answers have omitted it for this many seconds.
OMITTED_S = 30.0


class JobFollower(RemoteExecutor):
    """Mixin class that overrides methods of the SLURM plugin's executor."""

    followed: FollowedRun

    def run_job(self, job: Any) -> None:
        """Submit a job, or postpone it after SLURM rejected another job for a temporary reason."""
        now, f = time.monotonic(), self.followed
        if f.run_is_ending.is_set():
            return
        with f.lock:
            f.old_output_signatures[job] = read_file_signatures(job.output)
            f.failed_jobs.discard(job)
            if f.postponed_jobs.is_submission_paused(now):
                f.postponed_jobs.jobs.append(job)
                return
        super().run_job(job)

    def report_job_submission(self, job_info: Any, register_job: bool = True) -> None:
        f = self.followed
        with f.lock:
            f.submitted_job_ids.add(job_info.external_jobid)
            f.waiting_jobs.first_output_by_job_id[job_info.external_jobid] = get_first_output(
                job_info.job
            )
            f.old_output_signatures.setdefault(
                job_info.job, read_file_signatures(job_info.job.output)
            )
            f.last_message_at_s = time.monotonic()
            if not (job_info.aux or {}).get("adopted"):
                f.postponed_jobs.end_pause()
        super().report_job_submission(job_info, register_job=register_job)

    def report_job_success(self, job_info: Any) -> None:
        self._update_run_at_job_end(job_info)
        self.followed.num_succeeded_jobs += 1
        super().report_job_success(job_info)

    def report_job_error(self, job_info: Any, msg: str | None = None, **kwargs: Any) -> None:
        """Report a failed job, or postpone it if SLURM rejected it for a temporary reason."""
        f = self.followed
        if job_info.external_jobid is None and (
            reason := submission.parse_sbatch_refusal(msg or "")
        ):
            if self._postpone_job_if_refusal_is_temporary(job_info.job, reason):
                return
            self._update_run_at_job_end(job_info)
            f.failed_jobs.add(job_info.job)
            first = get_first_output(job_info.job)
            known = reason in f.reported_refusal_reasons
            f.reported_refusal_reasons.add(reason)
            f.print_message(
                f"SLURM refuses {first} for the same reason as a job above"
                if known
                else f"SLURM refuses it: {reason}. {f.request_text_by_output.get(first, first)} "
                f"{format_help_address('SLURM refuses it')}."
            )
            # Snakemake's own report would print the job's long command line.
            fail_job_silently(self.workflow, job_info.job)
            return
        self._update_run_at_job_end(job_info)
        f.failed_jobs.add(job_info.job)
        super().report_job_error(job_info, msg=msg, **kwargs)

    def _update_run_at_job_end(self, job_info: Any) -> None:
        f = self.followed
        with f.lock:
            f.last_message_at_s = time.monotonic()
            f.waiting_jobs.first_output_by_job_id.pop(job_info.external_jobid, None)
            # A user's limit on the number of jobs may now allow another job.
            f.postponed_jobs.next_submission_at_s = 0.0

    def _postpone_job_if_refusal_is_temporary(self, job: Any, reason: str) -> bool:
        """Postpone a job that SLURM has rejected for `reason`, if the reason is temporary.

        Returns:
            Whether the job was postponed.
        """
        f, now = self.followed, time.monotonic()
        kind = submission.classify_refusal(reason)
        if kind is None or (kind == "limit" and job_states.has_user_live_jobs() is False):
            return False
        with f.lock:
            f.postponed_jobs.add_refused_job(job, kind, now)
            if kind not in f.postponed_jobs.reported_refusal_kinds:
                f.postponed_jobs.reported_refusal_kinds.add(kind)
                f.print_message(self._describe_postponement(kind, reason))
        return True

    def _describe_postponement(self, kind: submission.Kind, reason: str) -> str:
        if kind == "silence":
            return (
                f"sbatch fails for now ({reason}); the remaining jobs are submitted later, and sbatch is "
                f"tried again for {submission.SILENCE_S / 60:.0f} minutes "
                f"{format_help_address('sbatch fails for now')}"
            )
        live = len(self.followed.waiting_jobs.first_output_by_job_id) or 1
        return (
            f"SLURM takes no more jobs of yours at a time ({reason}); the remaining jobs are submitted when "
            f"earlier ones end; with `jobs: {live}` in the profile Snakemake submits no more at a time "
            f"{format_help_address('SLURM takes no more jobs of yours')}"
        )

    def _submit_postponed_jobs(self) -> None:
        """Submit the postponed jobs one by one, until SLURM rejects one again."""
        f = self.followed
        while not f.run_is_ending.is_set():
            now = time.monotonic()
            with f.lock:
                if not f.postponed_jobs.jobs or f.postponed_jobs.is_submission_paused(now):
                    return
                if f.postponed_jobs.has_waited_too_long(now):
                    given_up, f.postponed_jobs = f.postponed_jobs.jobs, submission.Postponed()
                    break
                job = f.postponed_jobs.jobs.pop(0)
            # SLURM may have accepted the job although sbatch reported a failure.
            states = job_states.read_job_states(self.run_uuid, self._list_slurm_clusters([job]))
            if states is None:
                with f.lock:
                    f.postponed_jobs.add_refused_job(job, "silence", now)
                return
            if not self._follow_already_submitted_job(job, states):
                super().run_job(job)
                self._wait_for_submission_report(job)
        else:
            return
        for job in given_up:
            reason = f"SLURM has taken no job for {submission.SILENCE_S / 60:.0f} minutes"
            self.report_job_error(SubmittedJobInfo(job), msg=f"{reason}: each sbatch failed. ")

    def _wait_for_submission_report(self, job: Any) -> None:
        """Wait until the plugin's other thread has reported the submission of a job."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not self.followed.run_is_ending.is_set():
            with self.followed.lock:
                reported = [*self.followed.postponed_jobs.jobs, *self.followed.failed_jobs]
                if job in reported or any(info.job is job for info in self.active_jobs):
                    return
            time.sleep(0.01)

    def _follow_already_submitted_job(self, job: Any, states: Mapping[str, JobState]) -> bool:
        """Follow the SLURM job that an earlier, unanswered sbatch has created for `job`, if any.

        Returns:
            Whether SLURM has such a job.
        """
        comment = self._make_job_comment(job)
        for id_, state in states.items():
            if state.comment == comment and id_ not in self.followed.submitted_job_ids:
                shown = read_command_output(["scontrol", "--oneliner", "show", "job", id_]) or ""
                log = shown.partition(" StdOut=")[2].partition(" ")[0]
                aux = {"slurm_logfile": Path(log), "adopted": True}
                self.report_job_submission(SubmittedJobInfo(job, external_jobid=id_, aux=aux))
                return True
        return False

    async def check_active_jobs(self, active_jobs: list[Any]) -> AsyncIterator[Any]:
        """Report jobs that have ended, and yield all others. Yield all while SLURM does not answer."""
        f = self.followed
        await asyncio.to_thread(self._submit_postponed_jobs)
        if not active_jobs and not f.postponed_jobs.jobs:
            self.next_seconds_between_status_checks = FIRST_LOOK_S
            return
        clusters = self._list_slurm_clusters([info.job for info in active_jobs])
        states = await asyncio.to_thread(job_states.read_job_states, self.run_uuid, clusters)
        now = time.monotonic()
        if states is None:
            self._warn_that_slurm_does_not_answer(now, len(active_jobs))
            for info in active_jobs:
                yield info
            self.next_seconds_between_status_checks = FIRST_LOOK_S
            return
        f.slurm_silent_since_s, f.has_reported_silence = None, False
        has_ended, live = False, {}
        for info in active_jobs:
            state = states.get(info.external_jobid)
            reason = self._find_job_failure_reason(info, state)
            if reason is None:
                live[info.external_jobid] = state or JobState("RUNNING")
                yield info
                continue
            has_ended = True
            if reason:
                logs = [str(info.aux["slurm_logfile"])] if info.aux else []
                self.report_job_error(info, msg=reason, aux_logs=logs)
            else:
                self.report_job_success(info)
                self._remove_slurm_log(info)
        for sentence in f.waiting_jobs.iter_wait_explanations(live, now):
            f.print_message(sentence)
        if now - f.last_message_at_s >= PROGRESS_S:
            f.print_message(self._describe_progress(live))
        self._schedule_next_check(has_ended)

    def _schedule_next_check(self, any_job_has_ended: bool) -> None:
        looked_s = self.next_seconds_between_status_checks
        pause_s = FIRST_LOOK_S if any_job_has_ended else min(looked_s + 10, MAX_LOOK_S)
        with self.followed.lock:
            if self.followed.postponed_jobs.jobs:
                until_s = self.followed.postponed_jobs.next_submission_at_s - time.monotonic()
                pause_s = min(pause_s, max(until_s, 1.0))
        self.next_seconds_between_status_checks = pause_s

    def _find_job_failure_reason(self, info: Any, state: JobState | None) -> str | None:
        """Return why a job has failed. Empty if it succeeded, None if it has not ended."""
        job, word = info.external_jobid, state.state if state else ""
        if state:
            self.followed.omitted_since_s_by_job_id.pop(job, None)
        else:
            now = time.monotonic()
            if now - self.followed.omitted_since_s_by_job_id.setdefault(job, now) < OMITTED_S:
                return None
            word = job_states.read_accounted_state(job) or ""
        if word == job_states.COMPLETED:
            return ""
        if state and word not in job_states.FAILED:
            return None
        if self._has_written_outputs(info.job):
            return ""  # the job wrote its result before SLURM killed it
        settings = self.workflow.executor_settings
        if word in ("NODE_FAIL", "PREEMPTED") and state and getattr(settings, "requeue", False):
            return None  # SLURM restarts the job by itself
        if word == "NODE_FAIL" and state:
            exclude_nodes(self, state.node_names)
        if not word:
            text = "SLURM does not know it any more, and it has written no result "
            text += format_help_address("SLURM does not know it any more")
        else:
            where = f" on {state.node_names}" if state and state.node_names else ""
            text = f"{word}{where}" + (f": {ENDS[word]}" if word in ENDS else "")
        log = info.aux.get("slurm_logfile") if info.aux else None
        own = [Path(path) for path in getattr(info.job, "log", None) or ()]
        unstarted = explain_unstarted_rule([*own, Path(log)]) if log else None
        return f"SLURM job {job} failed: {text}. " + (f"{unstarted}. " if unstarted else "")

    def _has_written_outputs(self, job: Any) -> bool:
        """Return whether all output files of a job exist and are newer than its submission."""
        before = self.followed.old_output_signatures.get(job) or {}
        now = read_file_signatures(job.output)
        return bool(now) and all(s is not None and s != before.get(p) for p, s in now.items())

    def _warn_that_slurm_does_not_answer(self, now: float, num_jobs: int) -> None:
        f = self.followed
        f.slurm_silent_since_s = f.slurm_silent_since_s or now
        if now - f.slurm_silent_since_s >= UNANSWERED_S and not f.has_reported_silence:
            f.has_reported_silence = True
            f.print_message(
                f"SLURM has not answered for {UNANSWERED_S / 60:.0f} minutes; this run waits for its "
                f"{format_count(num_jobs, 'job')}, which may still train "
                f"{format_help_address('SLURM has not answered')}"
            )

    def _describe_progress(self, live: Mapping[str, JobState]) -> str:
        f = self.followed
        with f.lock:
            n = len(f.postponed_jobs.jobs)
            text = describe_progress(
                f.num_planned_jobs, f.num_succeeded_jobs, len(f.failed_jobs), n, live
            )
            done_or_failed = f.num_planned_jobs - f.num_succeeded_jobs - len(f.failed_jobs)
        running = sum(s.state not in job_states.QUEUED for s in live.values())
        times = [
            f.max_time_s_by_output.get(f.waiting_jobs.first_output_by_job_id.get(job, ""))
            for job in live
        ]
        if running and n == 0 and done_or_failed == len(live) and None not in times:
            most_h = sum(times) / running / 3600
            text += f"; by the plan, at most {most_h:.1f} h remain if {running} jobs run at a time"
        return text

    def _remove_slurm_log(self, info: Any) -> None:
        """Remove SLURM's log of a job that has succeeded, unless the profile keeps such logs."""
        log = info.aux.get("slurm_logfile") if info.aux else None
        if log and not getattr(self.workflow.executor_settings, "keep_successful_logs", False):
            Path(log).unlink(missing_ok=True)

    async def sleep(self) -> None:
        """Wait until SLURM is to be asked again, or until Snakemake ends.

        Snakemake's own method would sleep until the next request, even if Snakemake ends.
        """
        until = time.monotonic() + self.next_seconds_between_status_checks
        while self.wait and time.monotonic() < until:
            await asyncio.sleep(WAKE_S)

    def cancel_jobs(self, active_jobs: list[Any]) -> None:
        """Cancel all jobs of the run, including those of which Snakemake does not know yet."""
        self.followed.run_is_ending.set()
        self._cancel_jobs_of_run()

    def shutdown(self) -> None:
        super().shutdown()
        # A job may have been submitted while all jobs were cancelled, so they are cancelled once more.
        if self.followed.run_is_ending.is_set() and not self._cancel_jobs_of_run():
            print_to_stderr(
                "SLURM did not answer, so this run's jobs may still train; cancel them later by scancel "
                f"--name={self.run_uuid}"
            )

    def _cancel_jobs_of_run(self) -> bool:
        """Cancel all SLURM jobs of this run, and return whether SLURM has confirmed this."""
        names = ",".join(sorted(self._list_slurm_clusters(self.followed.old_output_signatures)))
        where = [f"--clusters={names}"] if names else []
        done = run_slurm_command(["scancel", "--quiet", f"--name={self.run_uuid}", *where])
        return done is not None and done.returncode == 0

    @staticmethod
    def _make_job_comment(job: Any) -> str:
        return make_job_comment(job.name, list(getattr(job, "wildcards", ())))

    @staticmethod
    def _list_slurm_clusters(jobs: Iterable[Any]) -> set[str]:
        keys = ("cluster", "clusters", "slurm_cluster")
        return {str(j.resources[k]) for j in jobs for k in keys if j.resources.get(k)}


def follow_jobs(workflow: Any, followed: FollowedRun) -> None:
    """Make Snakemake's executor follow its jobs on SLURM; call this before the first submission.

    Args:
        workflow: Snakemake's workflow, which submits to SLURM.
        followed: State of the run's jobs.
    """
    extend_executor(workflow, JobFollower).followed = followed
