"""The plan of a study: states, resources, projections, comparison with records; footprints made up."""

from __future__ import annotations

import csv
import html
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launching import settings
from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import format_bytes, format_hours, format_seconds
from stratbench.extensions.plan import __main__ as command
from stratbench.extensions.plan import check, device_rates, duration, quantities, schedule, servers
from stratbench.extensions.plan.check import DryRun
from stratbench.extensions.plan.duration import Span
from stratbench.extensions.plan.footprint import cache, traffic
from stratbench.extensions.plan.footprint.footprint import Affine, Footprint, MemoryPeak, Moment
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.needs import make_cell_to_plan
from stratbench.extensions.plan.pages import table
from stratbench.extensions.plan.pages.answers import answer_user_questions
from stratbench.extensions.plan.pages.text import format_plan, write_plan_html
from stratbench.extensions.servers.policies.policies import (
    POLICIES,
    make_policy,
    parse_policy_options,
)
from stratbench.extensions.servers.policies.policy import Hyper
from stratbench.extensions.servers.policies.preview import CHUNK
from stratbench.strategies import get_option_defaults
from stratbench.study import plan_file, resources
from stratbench.study.config import config as configuration
from stratbench.study.config.messages import ConfigError

pytestmark = pytest.mark.timeout(300)
GIB = 1 << 30


def config_of(
    results: Path,
    cluster: dict[str, Any] | None = None,
    variants: dict[str, Any] | None = None,
    **experiment: Any,
):
    block = {
        "dataset": "cifar10",
        "strategies": ["single", "ddp", "fsdp", "ps-async-modified"],
        "models": ["resnet50"],
        "gpus": [1, 2, 8],
        "epochs": 2,
        "global_batch": 64,
        "lr": 0.1,
        "precision": "fp16",
        "time_limit_s": 3000,
    }
    return {
        "study": "s",
        "results": str(results),
        "cluster": {"gpus_per_node": 4, "gpu": "A10G 24GB"} | (cluster or {}),
        "studies": {"s": {"variants": variants or {}, "experiments": {"e": block | experiment}}},
    }


def made_up(fixed_gib: float = 2.0, **changes: Any) -> Footprint:
    parts = {"parameters": Affine(GIB, 0), "activations": Affine((fixed_gib - 1) * GIB, 1 << 20)}
    fields: dict[str, Any] = {
        "model_states_bytes": {"parameters_bytes": GIB},
        "between_steps_bytes": {"parameters": GIB},
        "peak_moments": [Moment("backward", Affine(fixed_gib * GIB, 1 << 20), parts)],
        "evaluation_peak": MemoryPeak(GIB, "evaluation", {"activations": GIB}),
        "collectives": [("all_reduce", 400), ("broadcast", 100)],
        "flops_per_sample": 1e9,
        "training_flops_per_sample": 3e9,
        "operations_per_step": 1000,
        "touched_bytes": Affine(0, 1e6),
        "flat_tensor_bytes": {"weights": 1000, "buffers": 10},
    }
    return Footprint(**fields | changes)


@pytest.fixture
def plan_of(tmp_path: Path, monkeypatch):
    """A function that plans with a footprint for every request, or what is made of each."""

    def make(
        footprint: Footprint | str | Callable[[Request], Footprint] | None = None,
        records: schedule.Records | None = None,
        **kwargs: Any,
    ) -> schedule.Plan:
        config, study = configuration.load_config(config_of(tmp_path, **kwargs))
        given = footprint or made_up()

        def dry_run(request: Request) -> DryRun:
            if isinstance(given, str):
                return DryRun(unpredicted_reason=given)
            return DryRun(given if isinstance(given, Footprint) else given(request))

        nets = defaultdict(check.CheckResult)
        monkeypatch.setattr(
            check, "dry_run_requests", lambda wanted, _: (nets, {r: dry_run(r) for r in wanted})
        )
        checked = check.check_study(config, study, tries_both_resharding=True)
        return schedule.make_plan(config, checked, records or {})

    return make


def cell(plan: schedule.Plan, strategy: str, gpus: int) -> schedule.PlannedCell:
    return next(c for c in plan.cells if (c.cell.strategy, c.cell.gpus) == (strategy, gpus))


def test_a_cell_needs_its_peak_and_the_data_set_and_on_a_cpu_the_warm_ups_copy(plan_of):
    on_cpu, on_gpu = (cell(plan_of(made_up(is_on_cuda=where)), "ddp", 2) for where in (False, True))
    data_bytes = 60_000 * 3 * 32 * 32 + 8 * (60_000 + 50_000)
    for c, copied_bytes in ((on_cpu, GIB), (on_gpu, 0)):
        assert c.fit.peak.n_bytes == 2 * GIB + 32 * (1 << 20) + data_bytes
        assert c.fit.needed_bytes == c.fit.peak.n_bytes + copied_bytes
        assert c.fit.peak.parts_bytes["data"] == data_bytes
    # A GPU's copy waits in the host's memory.
    buffers = {"parameters": 3 * GIB, "buffers": GIB}
    more = cell(plan_of(made_up(is_on_cuda=True, between_steps_bytes=buffers)), "ddp", 2)
    assert more.fit.needed_bytes == on_gpu.fit.needed_bytes
    assert more.needs.host_bytes - on_gpu.needs.host_bytes == 2 * 3 * GIB


def test_rates_that_the_config_does_not_give_are_said(plan_of):
    told = "assumed, as config.yaml gives no rate: 32 GB/s between GPUs of a node (PCIe 4 x16; "
    told += "cluster.link_gb_per_s); 12.5 GB/s between nodes (cluster.network_gb_per_s)"
    assert told in " ".join(format_plan(plan_of()).split())
    given = {"link_gb_per_s": 300, "network_gb_per_s": 50}
    assert "assumed" not in format_plan(plan_of(cluster=given))
    assert "between nodes" not in format_plan(plan_of(strategies=["ddp"], gpus=[2]))
    assert "assumed" not in format_plan(plan_of(strategies=["single"], gpus=[1]))


def test_a_worker_that_splits_its_batch_computes_on_a_part_of_it(plan_of):
    c = cell(plan_of(), "ps-async-modified", 2)
    assert c.subject.samples_per_step == 8
    assert c.needs.wire_bytes == 4 * (1000 + 10)


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.5, "fits"), (0.8, "fits"), (0.82, "tight"), (1.03, "tight"), (1.04, "does not fit")],
)
@pytest.mark.parametrize(("gpu", "gib"), [("A10G", 24), ("A100 SXM 80 GB", 80)])
def test_a_need_fits_to_81_and_is_tight_to_103_percent_of_a_gpu(
    plan_of, gpu: str, gib: int, share: float, verdict: str
):
    data_gib = (60_000 * 3 * 32 * 32 + 8 * (60_000 + 50_000)) / GIB
    footprint = made_up(share * gib - data_gib - 8 / 1024, is_on_cuda=True)
    cluster = {"gpu": gpu, "skip_infeasible": True}
    plan = plan_of(footprint, strategies=["ddp"], gpus=[8], cluster=cluster)
    c = cell(plan, "ddp", 8)
    assert c.fit.needed_bytes == pytest.approx(share * gib * GIB)
    assert c.fit.memory_verdict == table.make_plan_row(c, [])["fits"] == verdict
    assert c.state == ("infeasible" if verdict == "does not fit" else "to do")
    assert ("GiB" in c.reason) == (verdict == "does not fit")
    told = {
        "fits": "all cells fit",
        "tight": "0 of 1 cells fit, 1 tight (",
        "does not fit": "1 do not",
    }
    assert told[verdict] in format_plan(plan)


def test_recorded_and_failed_cells_say_so(plan_of, tmp_path: Path):
    plan = plan_of()
    done, oom, failed = (cell(plan, "ddp", n).cell for n in (1, 2, 8))
    found = {
        done: {"status": "ok", "reason": None},
        oom: {"status": "oom", "reason": "no memory"},
    }
    for record in found.values():
        record |= {"time": {"train_time_s": None}, "cell": done.as_dict()}
    evidence = failed.log_dir(tmp_path) / "failure.json"
    evidence.parent.mkdir(parents=True)
    evidence.write_text(json.dumps({"reason": "rank 1 was lost"}))
    plan = plan_of(records=found)
    states = [(cell(plan, "ddp", n).state, cell(plan, "ddp", n).reason) for n in (1, 2, 8)]
    assert states == [("done", ""), ("recorded", "oom: no memory"), ("failed", "rank 1 was lost")]


def test_a_cell_that_cannot_be_predicted_is_told_and_spoils_nothing(plan_of):
    plan = plan_of("NotImplementedError: no such operator")
    assert all(c.state == "to do" and "no such operator" in c.reason for c in plan.cells)
    assert "no such operator" in format_plan(plan)


def test_what_is_not_known_is_counted_apart(plan_of):
    """It does not fit, and it does not not: nothing says `all` beside it, nor that nothing is left."""
    plan = plan_of("RuntimeError: it cannot", strategies=["ddp"], gpus=[2])
    told = format_plan(plan)
    assert "A10G: 0 of 1 cells fit, 1 not known (margin 10%)" in told
    assert "no cell could be predicted" in told
    assert "all cells fit" not in told
    assert "nothing left to do" not in told
    assert quantities.sum_plan_totals(plan, plan.device)["gpu_hours"] is None
    assert "all cells fit" in format_plan(plan_of(strategies=["ddp"], gpus=[2]))


def test_each_column_of_the_table_has_what_its_name_says(plan_of):
    states = {f"{s}_bytes": GIB for s in ("parameters", "gradients", "optimizer", "buffers")}
    cluster = {"price_per_gpu_hour": 3, "compare_gpus": ["A100 40GB"]}
    plan = plan_of(made_up(model_states_bytes=states), cluster=cluster)
    c = cell(plan, "ps-async-modified", 8)
    row = table.make_plan_row(c, plan.compared_devices)
    assert [name for name, value in row.items() if value == ""] == ["reason", "stage_peaks_mib"]
    MIB = 1 << 20
    for name, n_bytes in (
        ("needed_mib", c.fit.needed_bytes),
        ("parameters_mib", GIB),
        ("snapshots_mib", 2 * 1010),
        ("host_mem_mib_needed", c.needs.host_bytes),
    ):
        assert row[name] == round(n_bytes / MIB, 2), name
    assert row["slurm_mem_mib"] == c.job_request.mem_mib
    assert float(row["gpu_hours_high"]) == pytest.approx(
        8 * c.fit.total_span.high_s / 3600, rel=1e-5
    )
    assert float(row["cost_high"]) == pytest.approx(3 * float(row["gpu_hours_high"]), rel=1e-5)
    assert row["fits A100 SXM 40 GB"] == "fits"
    unknown = table.make_plan_row(cell(plan_of("no such operator"), "ddp", 2), [])
    assert {unknown[name] for name in ("needed_mib", "fits", "train_time_s_low", "cost_high")} == {
        ""
    }
    assert unknown["slurm_mem_mib"] > 0


def test_the_peaks_of_all_stages_are_told(plan_of):
    stages = [made_up(gib) for gib in (2.0, 4.0, 3.0)]
    plan = plan_of(made_up(stage_footprints=stages), strategies=["ddp"], gpus=[8])
    c = plan.cells[0]
    row = table.make_plan_row(c, [])
    peaks = [float(mib) for mib in row["stage_peaks_mib"].split()]
    assert max(peaks) == peaks[1] == row["peak_mib"]
    assert [round(peaks[1] - mib) for mib in peaks] == [2048, 0, 1024]
    each = ", ".join(format_bytes(mib * 2**20) for mib in peaks)
    (said,) = dict(answer_user_questions(plan))["What takes the memory?"]
    assert said.endswith(f"; the peaks of the stages are {each}.")


def test_the_page_and_the_text_show_what_the_table_has(plan_of, tmp_path: Path):
    states = {f"{s}_bytes": GIB for s in ("parameters", "gradients", "optimizer", "buffers")}
    plan = plan_of(made_up(model_states_bytes=states), strategies=["ddp"], gpus=[8])
    c = plan.cells[0]
    write_plan_html(plan, tmp_path / "plan.html")
    page = html.unescape((tmp_path / "plan.html").read_text())
    shown = re.findall("<td>(.*?)</td>", page)
    fit, (amount, unit) = c.fit, format_bytes(c.fit.needed_bytes).split()
    peak, sent = format_bytes(fit.peak.n_bytes), format_bytes(c.needs.wire_bytes)
    span, batch = quantities.format_time_range(fit.train_span), str(fit.largest_batch)
    at = shown.index(peak)
    assert 'title="the weights: 1.00 GiB"' in shown[at + 1]
    usual, compared = (
        format_seconds(fit.usual_s),
        quantities.format_compared_time(fit.usual_s, fit.train_span),
    )
    rest = [f"{amount} {unit}", "fits", batch, sent, usual, span, fit.train_span.source]
    assert shown[at + 2 : at + 9] == rest
    told = format_plan(plan).splitlines()
    over = next(i for i, line in enumerate(told) if line.endswith("(! does not fit, ? tight)"))
    assert told[over].startswith(f"   {unit} per worker that a cell needs, at 8 workers")
    assert told[over + 2].split() == ["ddp", amount]
    assert " ".join(told[over + 5].split()) == f"ddp {compared}"


def test_eight_gpus_of_nodes_with_four_ask_for_two_nodes(plan_of):
    asked = cell(plan_of(), "ps-async-modified", 8).job_request
    assert (asked.nodes, asked.gres, asked.cpus, asked.runtime_min) == (2, "gpu:4", 4 * 8 + 4, 60)
    assert "--nodes=2" in asked.sbatch_command
    assert "--gres=gpu:4" in asked.sbatch_command


def test_a_cell_asks_for_the_memory_that_its_plan_says_if_that_is_more(plan_of, tmp_path: Path):
    flat = {"weights": 100 * GIB, "buffers": 0}
    plan = plan_of(made_up(flat_tensor_bytes=flat))
    planned = cell(plan, "ps-async-modified", 2)
    # Two workers' mirrors of weights and gradients; weights, momentum and snapshot of the server.
    assert planned.needs.host_bytes >= 2 * 2 * 100 * GIB + 3 * 100 * GIB
    assert planned.job_request.mem_mib == -(-planned.needs.host_bytes // (1 << 20))
    assert planned.job_request.is_memory_planned
    table.write_plan_json(plan, tmp_path / "plan.json")
    kept = plan_file.PlanFile(tmp_path / "plan.json")
    assert kept.get_host_mem_mib(planned.cell) == planned.job_request.mem_mib
    settings, longest_s = planned.subject.settings, round(planned.fit.total_span.high_s)
    further = replace(settings, seed=7)  # of another repeat
    for same in (settings, further):
        assert kept.get_max_time_s(planned.cell, same, plan.cluster) == longest_s
    # What was planned for fewer epochs, or for another GPU, is no limit of what is trained now.
    longer = replace(settings, epochs=200)
    assert kept.get_max_time_s(planned.cell, longer, plan.cluster) is None
    assert kept.get_max_time_s(planned.cell, settings, plan.cluster | {"gpu": "H100"}) is None
    without = resources.build_job_request(
        planned.cell, planned.subject.settings, plan.cluster, None
    )
    assert without.mem_mib < planned.job_request.mem_mib
    assert plan_file.PlanFile(tmp_path / "missing.json").get_host_mem_mib(planned.cell) == 0


def test_the_servers_of_an_elastic_cell_ask_for_their_memory_in_a_job_of_their_own(plan_of):
    flat = {"weights": 100 * GIB, "buffers": 0}
    block = {"strategies": ["ps-async"], "gpus": [2], "precision": "fp32"}
    gang, elastic = (
        plan_of(made_up(flat_tensor_bytes=flat), **block, elastic=e).cells[0] for e in (False, True)
    )
    # Weights, momentum and snapshot, and what is received: no worker shares memory with it.
    assert elastic.job_request.mem_mib >= 3 * 100 * 1024
    assert elastic.needs.server_bytes > gang.needs.server_bytes


def test_the_workers_of_servers_hold_all_epochs_tables(plan_of):
    few, many = plan_of(augment=True), plan_of(augment=True, epochs=92)
    for strategy, more_bytes in (("ddp", 0), ("ps-async-modified", 2 * 90 * 7 * 50_000)):
        grown = cell(many, strategy, 2).needs.host_bytes - cell(few, strategy, 2).needs.host_bytes
        assert grown == more_bytes


def test_a_plan_says_what_no_node_can_hold(plan_of, monkeypatch):
    monkeypatch.setattr(
        schedule.nodes,
        "read_cluster_nodes",
        lambda: schedule.nodes.parse_sinfo("gpu*|n1|16|24000|gpu:4|infinite"),
    )
    plan = plan_of()
    told = " ".join(format_plan(plan).split())  # its lines are broken at 100 columns
    asked = "s/e: ddp, resnet50, 2 workers, repeat 0 asks for a node with 2 GPUs, 16 CPU cores"
    assert f"no node can hold: {asked}" in told
    told = told.partition(asked)[2]
    assert "the largest node of partition gpu has 4 GPUs, 16 CPU cores, 24,000 MiB" in told
    assert "lower cluster.mem_mib_per_gpu" in told
    monkeypatch.setattr(schedule.nodes, "read_cluster_nodes", list)
    assert "no node can hold" not in format_plan(plan_of())


def test_a_plan_says_what_is_infeasible_only_for_what_was_planned(plan_of, tmp_path: Path):
    plan = plan_of(made_up(500))
    planned = cell(plan, "ddp", 8)
    table.write_plan_json(plan, tmp_path / "plan.json")
    kept = plan_file.PlanFile(tmp_path / "plan.json")
    settings = planned.subject.settings
    assert plan.gpu is not None
    assert kept.get_infeasibility_reason(planned.cell, settings, plan.cluster) == planned.reason
    other = replace(settings, lr=0.5)
    assert kept.get_infeasibility_reason(planned.cell, other, plan.cluster) is None
    assert (
        kept.get_infeasibility_reason(planned.cell, settings, plan.cluster | {"gpu": "H100"})
        is None
    )


def test_without_a_limit_of_its_own_a_cell_asks_for_the_time_that_its_plan_says():
    cluster = {"startup_allowance_s": 60}
    assert resources.compute_job_time_limit_minutes(None, cluster) == 24 * 60
    assert resources.compute_job_time_limit_minutes(None, cluster, planned_s=600.0) == 11
    assert resources.compute_job_time_limit_minutes(120.0, cluster, planned_s=600.0) == 3


def test_the_time_limit_cuts_off_what_cannot_end_before_it(plan_of):
    quick = cell(plan_of(), "single", 1).fit
    assert quick.time_limit_verdict == "no"
    assert cell(plan_of(epochs=10_000), "single", 1).fit.time_limit_verdict == "certain"
    # Some number of epochs lies between.
    cuts = {cell(plan_of(epochs=n), "single", 1).fit.time_limit_verdict for n in (20, 60, 180, 500)}
    assert "possible" in cuts


def test_cost_is_told_where_a_price_is_known(plan_of):
    assert ", cost " not in format_plan(plan_of())
    assert ", cost " in format_plan(plan_of(cluster={"price_per_gpu_hour": 3}))


def test_a_study_of_one_number_of_workers_that_is_done_says_both(plan_of):
    plan = plan_of(strategies=["ddp"], gpus=[2])
    record = {"status": "oom", "reason": "no memory", "time": {"train_time_s": None}}
    only = cell(plan, "ddp", 2).cell
    found = {only: record | {"cell": only.as_dict()}}
    plan = plan_of(records=found, strategies=["ddp"], gpus=[2])
    told = format_plan(plan)
    assert "nothing left to do" in told
    assert "0.0 to 0.0" not in told
    answers = dict(answer_user_questions(plan))
    assert answers["How does the peak memory change with the number of workers?"] == [
        "No strategy of the study runs on two different numbers of workers."
    ]


def test_the_plan_of_a_small_network_is_told_in_units_that_show_it(plan_of):
    small = made_up(
        peak_moments=[Moment("backward", Affine(3 << 20, 0), {"parameters": Affine(3 << 20, 0)})],
        between_steps_bytes={"parameters": 1 << 20},
        evaluation_peak=MemoryPeak(1 << 20, "evaluation", {"activations": 1 << 20}),
        operations_per_step=1,
    )
    plan = plan_of(
        small, strategies=["ddp", "zero1", "ps-sync", "fsdp"], gpus=[2], steps=1, epochs=None
    )
    told = format_plan(plan)
    assert "GiB per worker" not in told
    assert "MiB per worker that a cell needs" in told
    assert "KiB that a worker sends in a step" in told
    assert "0-0 s" not in told
    assert "under 1 s" in told
    assert "0.0 to 0.0" not in told
    # Their fields are the same here; whoever shares a row is named.
    assert "ddp and 2 alike" in told
    assert "     equal values: ddp, zero1, fsdp" in told
    assert "A batch of all 50,000 training samples would fit." in " ".join(told.split())
    assert "The largest batch that" in format_plan(
        plan_of(strategies=["single"], gpus=[1])
    )  # with a MiB for each sample


def test_nothing_sent_is_told_in_the_unit_of_the_networks_weights(plan_of):
    told = format_plan(plan_of(strategies=["single"], gpus=[1]))
    assert "KiB that a worker sends" not in told
    assert "MiB that a worker sends" in told or "GiB that a worker sends" in told


def test_amounts_have_units_in_which_they_are_at_least_one():
    assert format_bytes(3 * GIB / 2) == "1.50 GiB"
    assert [format_bytes(n * GIB) for n in (9.996, 79.5, 99.96)] == [
        "10.0 GiB",
        "79.5 GiB",
        "100 GiB",
    ]
    assert format_bytes(5 << 20) == "5 MiB"
    assert format_bytes(-(2 << 10)) == "-2 KiB"
    assert format_bytes(0) == "0"
    assert quantities.format_bytes_in_unit(1023 << 20, 1 << 20) == "1023"
    assert quantities.format_bytes_in_unit(4.46 * (1 << 20), 1 << 20) == "4.46"
    assert quantities.format_time_range(Span(0.01, 0.4, "")) == "under 1 s"


def test_the_questions_are_answered(plan_of):
    plan = plan_of(models=["resnet50", "vgg16"])
    found = dict(answer_user_questions(plan))
    assert all(found.values())
    assert "the batch fits" in " ".join(
        found["Can FSDP keep the gathered weights between forward and backward?"]
    )


def kept_weights(request: Request) -> Footprint:
    """Without resharding a worker holds 1 GiB more, and 3 GiB more where its weights lie on the host."""
    kept = request.options.get("reshard_after_forward") == "never"
    return made_up(2.0 + kept * (3 if request.options.get("offload") == "cpu" else 1))


def test_each_kind_of_fsdp_is_told_what_keeping_its_weights_costs(plan_of):
    variants = {
        "fsdp-zero2": {"strategy": "fsdp", "reshard_after_forward": "never"},
        "fsdp-offload": {"strategy": "fsdp", "offload": "cpu"},
    }
    question = "Can FSDP keep the gathered weights between forward and backward?"

    def told(**block: Any) -> list[str]:
        block = {"variants": variants, "gpus": [4], "precision": "fp32"} | block
        plan = plan_of(kept_weights, **block)
        return [
            said.partition("4 workers")[2] for said in dict(answer_user_questions(plan))[question]
        ]

    one, other = told(strategies=["ddp", "fsdp", "fsdp-zero2", "fsdp-offload"])
    assert one.startswith(", fsdp: keeping gathered weights takes 1.00 GiB ")
    assert other.startswith(", fsdp-offload: keeping gathered weights takes 3.00 GiB ")
    (alone,) = told(strategies=["fsdp", "fsdp-zero2"])
    assert alone.startswith(": keeping gathered weights takes 1.00 GiB ")


def test_where_some_cells_are_on_cpus_each_is_judged_by_its_own_memory(plan_of):
    plan = plan_of(kept_weights, strategies=["fsdp"], gpus=[4])
    on_cpu = replace(plan.cells[0].fit, device="CPU", room_bytes=1.0 * GIB)
    cells = [replace(plan.cells[0], fits_on={"CPU": on_cpu})]
    answers = dict(answer_user_questions(replace(plan, cells=cells)))
    (said,) = answers["Can FSDP keep the gathered weights between forward and backward?"]
    assert "the batch does not fit (at most 0 samples do)" in said


def test_a_cell_with_any_record_is_not_counted_as_still_to_do(plan_of, monkeypatch):
    plan = plan_of(strategies=["ddp"], gpus=[2])
    assert quantities.sum_plan_totals(plan, plan.device)["gpu_hours"][1] > 0
    small = schedule.nodes.parse_sinfo("gpu*|n1|16|24000|gpu:4|infinite")
    monkeypatch.setattr(schedule.nodes, "read_cluster_nodes", lambda: small)
    record = record_of("ddp", 2, 5.0) | {"status": "unsupported", "reason": "it cannot"}
    found = {plan.cells[0].cell: record | {"time": {"train_time_s": None}}}
    plan = plan_of(records=found, strategies=["ddp"], gpus=[2])
    assert (plan.cells[0].state, plan.texts_on_too_large_cells) == ("unsupported", [])
    assert quantities.sum_plan_totals(plan, plan.device)["gpu_hours"] == (0, 0)
    assert "nothing left to do" in format_plan(plan)


def test_the_plan_names_types_of_gpus_where_none_is_chosen(plan_of, monkeypatch):
    mixed = schedule.nodes.parse_sinfo("gpu*|n1|16|24000|gpu:a100:2,gpu:v100:2|infinite")
    monkeypatch.setattr(schedule.nodes, "read_cluster_nodes", lambda: mixed)
    cuda = {"strategies": ["ddp"], "gpus": [2], "device": "cuda"}
    assert "several types, a100" in format_plan(plan_of(**cuda))
    typed = format_plan(plan_of(**cuda, cluster={"gpu_type": "a100"}))
    assert "several types" not in typed


def test_no_node_is_missed_for_a_cell_that_is_skipped(plan_of, monkeypatch):
    small = schedule.nodes.parse_sinfo("gpu*|n1|16|24000|gpu:4|infinite")
    monkeypatch.setattr(schedule.nodes, "read_cluster_nodes", lambda: small)
    for skips in (False, True):
        plan = plan_of(
            made_up(500), strategies=["ddp"], gpus=[2], cluster={"skip_infeasible": skips}
        )
        assert {c.state for c in plan.cells} == {"infeasible"}
        assert bool(plan.texts_on_too_large_cells) != skips


def test_what_a_verdict_costs_is_told_and_where_cells_are_too_short_for_a_tenth(plan_of):
    long = dict(answer_user_questions(plan_of(epochs=2000)))
    short = dict(answer_user_questions(plan_of(epochs=1)))
    (question,) = (q for q in long if "verdict" in q)
    assert not any("too short" in sentence for sentence in long[question])
    assert "few strategies are compared" in long[question][1]  # there are three
    assert "of the full matrix of 3 repeats" in long[question][0]
    assert "a tenth of the full matrix, because their cells are too short" in short[question][1]
    assert "start of its processes" in short[question][1]
    assert [format_hours(h) for h in (0.0123, 3.21, 123.4, 12345)] == [
        "0.012",
        "3.2",
        "123",
        "12,345",
    ]


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A10G 24GB", "A10G"),
        ("A100 80 GB", "A100 SXM 80 GB"),
        ("a100 pcie 80gb", "A100 PCIe 80 GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("H100", "H100 SXM"),
        ("H100 96GB", "H100 96 GB"),
        ("A10", "A10"),
        ("Tesla T4", "T4"),
    ],
)
def test_a_gpu_is_found_by_what_people_call_it(text: str, name: str):
    assert device_rates.find_gpu_datasheet(text).name == name


@pytest.mark.parametrize("text", ["A100 81GB", "", "24GB", "Z9000"])
def test_an_unknown_gpu_is_refused_with_those_that_are_known(text: str):
    with pytest.raises(ConfigError, match=r"cluster\.gpu.*A10G"):
        device_rates.find_gpu_datasheet(text)


# --- projections ---------------------------------------------------------------------------------


def record_of(strategy: str, gpus: int, seconds: float, experiment: str = "e", repeat: int = 0):
    c = Cell("s", experiment, strategy, "resnet50", "cifar10", gpus, repeat)
    return {"cell": asdict(c), "status": "ok", "time": {"train_time_s": seconds}}


TARGET = Cell("s", "e", "ddp", "resnet50", "cifar10", 4, 2)


def test_repeats_of_the_cell_are_the_best_source():
    records = [
        record_of("ddp", 4, 100),
        record_of("ddp", 4, 120, repeat=1),
        record_of("ddp", 2, 150),
    ]
    span = duration.estimate_time_from_records(TARGET, records)
    assert (span.low_s, span.high_s) == pytest.approx((90, 132))
    assert "2 records" in span.source


def test_another_worker_count_bounds_the_time_by_perfect_and_no_scaling():
    span = duration.estimate_time_from_records(
        TARGET, [record_of("ddp", 2, 100), record_of("single", 1, 500)]
    )
    assert (span.low_s, span.high_s) == pytest.approx((45, 110))


def test_records_of_other_experiments_and_failures_do_not_count():
    oom = record_of("ddp", 4, 100) | {"status": "oom"}
    assert (
        duration.estimate_time_from_records(
            TARGET, [oom, record_of("ddp", 4, 100, experiment="other")]
        )
        is None
    )


def test_a_records_time_replaces_the_devices(plan_of):
    first = plan_of().cells[0].cell
    fit = cell(plan_of(records={first: record_of("ddp", 2, 777.0)}), "ddp", 2).fit
    assert fit.train_span.low_s == pytest.approx(0.9 * 777)
    assert fit.device_rate_span.low_s != fit.train_span.low_s


@pytest.mark.parametrize(
    ("name", "counts"),
    [("NVIDIA A10G", True), ("NVIDIA L4", False), ("a new one", True), (None, True)],
)
def test_records_of_another_gpu_say_nothing_of_the_times_on_this_one(plan_of, name, counts: bool):
    """The plan is of A10Gs. Nobody knows a GPU that is not in the table."""
    of = {"workers": [{"provenance": {"gpu": name and {"name": name}}}]}
    first = plan_of().cells[0].cell
    fit = cell(plan_of(records={first: record_of("ddp", 2, 777.0) | of}), "ddp", 2).fit
    assert (fit.train_span == fit.device_rate_span) != counts


def test_records_of_any_gpu_that_a_short_name_may_mean_count():
    record = {"workers": [{"provenance": {"gpu": {"name": "NVIDIA A100 80GB PCIe"}}}]}
    for gpu, counts in ((None, 1), ("A100 80GB", 1), ("A100 40GB", 0), ("A100 SXM 80 GB", 0)):
        assert len(schedule.select_timed_records({TARGET: record}, gpu)) == counts, gpu


# --- traffic and servers -------------------------------------------------------------------------


def test_ring_traffic():
    assert traffic.CollectiveCall("all_reduce", 100).compute_ring_sent_bytes(4) == 150
    assert traffic.CollectiveCall("all_gather", 100).compute_ring_sent_bytes(4) == 75
    assert traffic.CollectiveCall("all_reduce", 100).compute_ring_sent_bytes(1) == 0
    mixed = [("all_gather", 100), ("reduce_scatter", 100)]
    assert traffic.compute_wire_bytes(mixed, 2, on_gloo=False) == 100
    assert traffic.compute_wire_bytes(mixed, 2, on_gloo=True) == 150


def tensors_in(value: Any, seen: set[int]) -> int:
    """Elements of all distinct tensors that an object keeps."""
    import torch

    if isinstance(value, torch.Tensor):
        new = value.data_ptr() not in seen
        seen.add(value.data_ptr())
        return value.numel() if new else 0
    if isinstance(value, dict):
        return sum(tensors_in(v, seen) for v in value.values())
    if isinstance(value, list | tuple | set):
        return sum(tensors_in(v, seen) for v in value)
    return tensors_in(vars(value), seen) if type(value).__module__.startswith("stratbench") else 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moments", [0, 1, 2])
def test_a_server_keeps_as_many_tensors_as_its_policy_does(policy: str, moments: int):
    import torch

    adamw = {"optimizer": "adamw", "betas": (0.9, 0.999), "eps": 1e-8}
    hyper = Hyper(lr=0.1, workers=3, **({"momentum": 0.9 * moments} if moments < 2 else adamw))
    if parse_policy_options(policy).refusal(hyper.optimizer):
        pytest.skip(f"its servers refuse {hyper.optimizer}")

    workers, n = 3, 2 * CHUNK
    weights = torch.zeros(n)
    kept = make_policy(policy, weights, hyper)
    optimizer = adamw if moments == 2 else {"momentum": hyper.momentum}
    options = get_option_defaults(policy)
    s = settings(policy, gpus=workers, options=options, **optimizer)
    needs = servers.predict_server_bytes_by_purpose(s, {"weights": 4 * n, "buffers": 0}, 1)
    chunk = CHUNK if policy == "ps-preview" else 0  # of a shard, a view is made in
    assert needs["weights"] + needs["optimizer"] == 4 * (tensors_in(kept, set()) - chunk)


def test_two_servers_share_the_weights_and_the_wire_format_halves_a_push():
    options = get_option_defaults("ps-sync") | {"servers": 2, "wire": "bfloat16"}
    flat = {"weights": 1000, "buffers": 10}
    shared = settings("ps-sync", options=options)
    over_tcp = replace(shared, options=options | {"transport": "tcp"})
    needs = servers.predict_server_bytes_by_purpose(over_tcp, flat, 1)
    assert needs["weights"] == 500
    assert needs["lanes"] > servers.predict_server_bytes_by_purpose(shared, flat, 1)["lanes"] == 0
    assert servers.predict_server_bytes_by_purpose(shared, flat, 2)["lanes"] == needs["lanes"]
    scaled = servers.predict_server_bytes_by_purpose(replace(over_tcp, precision="fp16"), flat, 1)
    assert scaled["lanes"] - needs["lanes"] == 2 * 500 // 2  # held as they came, until the verdict
    assert servers.compute_worker_sent_and_received_bytes(over_tcp, flat) == (510, 1000)
    assert servers.compute_worker_sent_and_received_bytes(shared, flat) == (1010, 1000)
    assert servers.compute_worker_sent_and_received_bytes(shared, flat, between_nodes=True) == (
        510,
        1000,
    )


# --- the cache and the command -------------------------------------------------------------------

TINY = {
    "dataset": "digits", "strategies": ["single"], "models": ["vgg-compact"], "gpus": [1],
    "epochs": 1, "global_batch": 16, "lr": 0.1, "device": "cpu",
}  # fmt: skip


@pytest.mark.slow
def test_the_command_plans_a_real_cell_and_then_reads_it_from_disk(
    tmp_path: Path, capsys, monkeypatch
):
    config = {
        "study": "s",
        "results": str(tmp_path),
        "studies": {"s": {"experiments": {"e": TINY}}},
    }
    assert command.main(["--config", json.dumps(config)]) == 0
    printed = capsys.readouterr().out
    assert "kinds of cells to trace: 1" in printed
    assert "1 to do" in printed
    [row] = list(csv.DictReader((tmp_path / "s" / "plan.csv").open()))
    assert float(row["peak_mib"]) > 1
    assert int(row["state_parameters_bytes"]) == int(row["state_optimizer_bytes"])
    assert "vgg-compact" in (tmp_path / "s" / "plan.html").read_text()

    def never(*given):
        raise AssertionError("all is on disk")

    monkeypatch.setattr(cache, "make_process_pool", never)
    assert command.main(["--config", json.dumps(config)]) == 0
    kept = list((tmp_path / "plan-cache").iterdir())
    assert len(kept) == 2  # of the network, and of the strategy with it
    for entry in kept:
        whole = entry.read_text()
        entry.write_text(whole[:100])
        with pytest.raises(AssertionError, match="on disk"):
            command.main(["--config", json.dumps(config)])
        entry.write_text(whole)


def test_a_request_has_the_workers_of_its_fullest_node(tmp_path: Path):
    """As far as its ranks differ: of a server's workers one stands for all, of DDP's ranks two."""
    config, study = configuration.load_config(
        config_of(tmp_path, strategies=["fsdp", "ddp", "ps-async"])
    )
    found = {
        (cell.strategy, cell.gpus): make_cell_to_plan(config, study, cell).request.workers_per_node
        for cell in study.cells
    }
    assert [found["fsdp", gpus] for gpus in (1, 2, 8)] == [1, 2, 4]
    assert (found["ddp", 8], found["ps-async", 8]) == (2, 1)


def test_a_footprint_is_made_again_when_what_it_depends_on_changes(monkeypatch, tmp_path: Path):
    config, study = configuration.load_config(config_of(tmp_path))
    request = asdict(make_cell_to_plan(config, study, study.cells[0]).request)
    before = cache.make_cache_key(request)
    monkeypatch.setattr(cache, "hash_source_files", lambda: "changed")
    assert cache.make_cache_key(request) != before
    monkeypatch.undo()
    monkeypatch.setattr(cache, "read_package_version", lambda name: "0")
    assert cache.make_cache_key(request) != before


def test_footprints_depend_on_files_that_are_there():
    for pattern in cache.SOURCES:
        assert list(cache.PACKAGE.glob(pattern)), pattern


def test_a_config_mistake_ends_in_one_line(tmp_path: Path, capsys):
    config = config_of(tmp_path, cluster={"gpu": "Z9000"})
    assert command.main(["--config", json.dumps(config)]) == 1
    assert capsys.readouterr().err.startswith("error: config: cluster.gpu = 'Z9000'")


def test_of_what_fits_the_quickest_and_those_near_it_are_named(plan_of):
    plan = plan_of(strategies=["ddp", "zero1", "fsdp"], gpus=[4])
    spans = {"ddp": (1, 9, 3.02), "zero1": (2, 8, 3.2), "fsdp": (1, 8, 3)}

    def told(state: str = "to do", **changes: tuple[float, float, float] | None) -> str:
        cells = []
        for c in plan.cells:
            span = (spans | changes)[c.cell.strategy]
            verdict = schedule.DOES_NOT_FIT if span is None else schedule.FITS
            ends, usual_s = (span[:2], span[2]) if span else (None, None)
            by_device = ends and Span(*ends, "")
            fit = replace(
                c.fit, device_rate_span=by_device, usual_s=usual_s, memory_verdict=verdict
            )
            cells.append(replace(c, fits_on={"A": fit}, state=state))
        (answer,) = dict(answer_user_questions(replace(plan, cells=cells)))[
            "Which cells fit, and which strategy is the fastest?"
        ]
        return answer

    assert "all cells fit; " in told()
    assert told().endswith(
        "fastest by the device's rates: fsdp, ddp (1-8 s or 1-9 s); within 10 %: zero1."
    )
    assert told(fsdp=(1, 2, 9)).endswith("ddp (1-9 s); within 10 %: zero1.")
    assert told(zero1=(1, 1, 1)).endswith("zero1 (1-1 s).")
    assert "2 of 3 cells fit" in told(fsdp=None)
    assert "no cell fits; " in told(ddp=None, zero1=None, fsdp=None)
    assert told(state="done").endswith(
        "; all are trained, and `stratbench decide` names the fastest."
    )


def test_how_much_larger_a_network_may_be_is_said_of_whoever_is_quickest_where_it_still_fits(
    plan_of,
):
    plan = plan_of(strategies=["ddp", "zero1", "fsdp"], gpus=[4])
    spans = {"ddp": (1, 2), "zero1": (1, 3), "fsdp": (1, 4)}
    kept_gib = {"ddp": 2, "zero1": 2, "fsdp": 1}  # of states; 1 GiB more is of activations
    cells = []
    for c in plan.cells:
        gib = kept_gib[c.cell.strategy]
        moment = Moment(
            "optimizer",
            Affine((gib + 1) * GIB, 0),
            {"optimizer": Affine(gib * GIB, 0), "activations": Affine(GIB, 0)},
        )
        fit = replace(
            c.fit,
            device_rate_span=Span(*spans[c.cell.strategy], ""),
            usual_s=spans[c.cell.strategy][1],
            room_bytes=9 * GIB + c.needs.data_bytes,
        )
        footprint = made_up(peak_moments=[moment], between_steps_bytes={})
        cells.append(replace(c, footprint=footprint, fits_on={plan.device: fit}))
    (said,) = dict(answer_user_questions(replace(plan, cells=cells)))[
        "By how much can the model grow and still fit?"
    ]
    # All grows: 9 / 3 and 9 / 2. The states alone: (9 - 1) / 2 and (9 - 1) / 1.
    assert said.endswith(
        "the fastest strategy that fits is ddp up to 3.0 to 4.0 times, then fsdp up to 4.5 to 8.0 times "
        "the number of parameters."
    )


def test_the_best_way_to_divide_a_network_is_named_with_its_numbers_and_what_does_not_fit(plan_of):
    question = "Which division of the model among workers is best?"
    assert question not in dict(answer_user_questions(plan_of(strategies=["ddp"], gpus=[4])))
    gpts = {
        "models": ["gpt-compact"],
        "dataset": "tinyshakespeare",
        "strategies": ["ddp", "tensor", "pipeline"],
    }
    plan = plan_of(**gpts, gpus=[4], precision="fp32")
    told = {  # seconds at best and at worst, GiB, whether it fits
        "ddp": (1, 2, 9, True), "tensor": (5, 6, 4, True), "pipeline": (3, 4, 3, True),
    }  # fmt: skip

    def answer(**changes: tuple[float, float, int, bool]) -> str:
        cells = []
        for c in plan.cells:
            low_s, high_s, gib, fits = (told | changes)[c.cell.strategy]
            verdict = schedule.FITS if fits else schedule.DOES_NOT_FIT
            fit = replace(
                c.fit,
                device_rate_span=Span(low_s, high_s, ""),
                usual_s=high_s,
                needed_bytes=gib * GIB,
                memory_verdict=verdict,
            )
            cells.append(replace(c, fits_on={"A": fit}))
        (said,) = dict(answer_user_questions(replace(plan, cells=cells)))[question]
        return said.partition(": ")[2]

    assert (
        answer()
        == "fastest division that fits: pipeline (S = 4); pipeline (S = 4) needs the least memory, 3.00 GiB."
    )
    assert answer(pipeline=(3, 4, 30, False)) == (
        "fastest division that fits: tensor (T = 4); tensor (T = 4) needs the least memory, 4.00 GiB; "
        "pipeline (S = 4) does not fit: it needs 30.0 GiB."
    )
    assert answer(pipeline=(3, 4, 30, False), tensor=(5, 6, 40, False)).startswith(
        "pipeline (S = 4) needs"
    )


@pytest.mark.parametrize(
    ("call", "node_ranks", "within"),
    [
        (("all_reduce", 100), 4, False),
        (("all_reduce", 100), 8, True),
        (("all_reduce", 0, 4, 100), 4, True),
        (("all_reduce", 0, 4, 100), 6, False),  # some groups of four are on two nodes
        (("all_gather", 100, 2, 0, 4), 4, False),
        (("all_gather", 100, 2, 0, 2), 4, True),
    ],
)
def test_groups_lie_within_a_node_or_on_several(call: tuple, node_ranks: int, within: bool):
    made = traffic.CollectiveCall(*call)
    assert made.as_tuple == call
    assert made.has_groups_within_nodes(node_ranks, 8) == within
    sent = traffic.compute_wire_bytes([call], 8, on_gloo=False, samples=1)
    inside = traffic.compute_wire_bytes(
        [call], 8, on_gloo=False, samples=1, ranks_per_node=node_ranks
    )
    assert inside == (sent if within else 0)


def test_what_a_group_sends_within_a_node_takes_that_nodes_link(plan_of):
    """Two copies of a network on two nodes: gradients between them, activations in each."""
    gpts = {"models": ["gpt-compact"], "dataset": "tinyshakespeare", "precision": "fp32"}
    collectives = [("all_reduce", 10**9, 2, 0, 4), ("all_reduce", 0, 4, 10**6)]
    options = {"tensor-4": {"strategy": "tensor", "tensor_parallel_size": 4}}
    plan = plan_of(
        made_up(collectives=collectives),
        strategies=["tensor-4"],
        variants=options,
        gpus=[8],
        **gpts,
    )
    c = cell(plan, "tensor-4", 8)
    activations = 2 * 3 / 4 * 10**6 * c.subject.samples_per_step
    assert (c.needs.sent_bytes_within_node, c.needs.awaited_bytes_within_node) == (
        activations,
        activations,
    )
    assert c.needs.wire_bytes == 10**9 + activations
    device = device_rates.make_gpu_device(
        device_rates.find_gpu_datasheet("A10G"), "fp32", plan.cluster
    )
    for rates, rate in enumerate(duration.LINK_UTILISATION):
        step = duration.predict_step_duration(device, c.subject, c.needs, rates)
        awaited_s = activations / 32e9 / rate
        assert step.awaited_s == pytest.approx(awaited_s)
        assert step.link_s == pytest.approx(10**9 / 12.5e9 / rate + awaited_s)


A100 = device_rates.find_gpu_datasheet("A100 80GB")


@pytest.fixture
def on_an_a100(plan_of):
    """Functions that make the cell of an experiment on A100s, and the three times of its step."""

    def times(c: schedule.PlannedCell, **changes: Any) -> list[float]:
        cluster = {"link_gb_per_s": None, "network_gb_per_s": None}
        device = device_rates.make_gpu_device(A100, c.subject.settings.precision, cluster)
        needs = replace(
            c.needs, slowest_rank_footprint=replace(c.needs.slowest_rank_footprint, **changes)
        )
        return [
            duration.predict_step_duration(device, c.subject, needs, rates).seconds
            for rates in range(3)
        ]

    def make(**experiment: Any) -> schedule.PlannedCell:
        block = {"strategies": ["fsdp"], "gpus": [8], "precision": "bf16"} | experiment
        return plan_of(**block, cluster={"gpu": "A100 80GB", "gpus_per_node": 8}).cells[0]

    return make, times


def test_a_step_has_one_time_within_its_range(on_an_a100):
    make, times = on_an_a100
    flops = {"training_flops_per_sample": 156e12, "touched_bytes": Affine(2.039e12, 0)}
    c = make(global_batch=16)
    best, worst, usual = times(c, operations_per_step=10**5, **flops)
    # 1 s of arithmetic and of memory at the peak, 0.2 to 1 s of launches; next to nothing is sent.
    assert best == pytest.approx(1 / 0.8)
    assert usual == pytest.approx(1 / 0.7 + 1 / 0.8)
    assert worst == pytest.approx(1 / 0.2 + 1 / 0.4 + 1)
    bound = times(c, operations_per_step=10**6, **flops)
    assert bound == pytest.approx([2, 1 / 0.2 + 1 / 0.4 + 10, 10])


def test_fused_attention_is_slower_where_cells_are_compared(on_an_a100):
    make, times = on_an_a100
    c = make(global_batch=16)
    flops = {"training_flops_per_sample": 156e12, "operations_per_step": 1}
    without, with_it = times(c, **flops), times(c, attention_share=0.5, **flops)
    assert with_it[:2] == without[:2]
    assert with_it[2] - without[2] == pytest.approx(0.5 * (1 / 0.6 - 1 / 0.7))
    hopper = device_rates.make_gpu_device(
        device_rates.find_gpu_datasheet("H100"), "bf16", {"link_gb_per_s": 1, "network_gb_per_s": 1}
    )
    assert hopper.attention_utilisation == 0.33


def test_what_is_compiled_touches_half_the_bytes_in_half_the_launches(on_an_a100):
    make, times = on_an_a100
    plain, compiled = make(), make(compile=True)
    little = {"training_flops_per_sample": 0, "touched_bytes": Affine(2.039e12, 0)}
    for n in (1, 10**6):
        expected = [s / 2 for s in times(plain, operations_per_step=n, **little)]
        assert times(compiled, operations_per_step=n, **little) == pytest.approx(expected, rel=1e-5)


def test_parameters_on_the_host_cost_their_copies_and_the_hosts_optimizer(on_an_a100):
    make, times = on_an_a100
    c = make()
    without = times(c)
    with_host = times(c, host_bytes={"parameters": 4 * 10**9, "optimizer": 8 * 10**9})
    more = [b - a for a, b in zip(without, with_host, strict=True)]
    assert more[2] == pytest.approx(3 * 4 / 12 + 28 / 20)
    assert more[0] == pytest.approx(more[2] / 2)
    assert more[1] == pytest.approx(more[2] * 2)


#: MPT on 8 A100 of 80 GB with FSDP: parameters, layers, width, samples per GPU, checkpointing, step (s);
#: https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md
PUBLISHED = [
    (29975214080, 48, 7168, 3 * 21, True, 140.82),
    (12853954560, 40, 5120, 2 * 3, False, 5.4321),
    (6658859008, 32, 4096, 6 * 2, False, 5.2951),
]


@pytest.mark.parametrize("published", PUBLISHED)
def test_a_published_step_is_in_its_range_and_near_its_one_time(on_an_a100, published):
    """By its multiplications alone, which take nearly all of such a step."""
    make, times = on_an_a100
    parameters, layers, width, samples, checkpointing, step_s = published
    c = make(global_batch=8 * samples, activation_checkpointing=checkpointing)
    attention = 4 * layers * width * 2048**2
    forward = 2 * parameters * 2048 + attention
    best, worst, usual = times(
        c,
        flops_per_sample=forward,
        training_flops_per_sample=3 * forward,
        recomputed_flops_per_sample=checkpointing * forward,
        attention_share=attention / forward,
    )
    assert best < step_s < worst
    assert usual == pytest.approx(step_s, rel=0.2)


def test_no_computation_hides_the_activations_that_a_layer_waits_for(plan_of):
    """At best, too: 3 s of computation beside 4 s of sending of which 1, 3 or 4 s are waited for."""
    plan = plan_of(strategies=["ddp"], gpus=[4])
    c = cell(plan, "ddp", 4)
    device = device_rates.make_gpu_device(
        device_rates.find_gpu_datasheet("A10G"), "fp16", plan.cluster
    )
    rate = device.get_slowest_link_bytes_per_s(1) * duration.LINK_UTILISATION[0]
    slowest = replace(
        c.needs.slowest_rank_footprint, training_flops_per_sample=0, operations_per_step=1
    )
    alone = replace(c.needs, slowest_rank_footprint=slowest, wire_bytes=0)
    computes_s = duration.predict_step_duration(device, c.subject, alone, 0).seconds
    sent = {"wire_bytes": 4 * computes_s * rate}
    for share in (0, 1, 3, 4):
        awaited = replace(alone, awaited_bytes=share * computes_s * rate, **sent)
        expected = max(1, 4 - share) + share
        assert duration.predict_step_duration(
            device, c.subject, awaited, 0
        ).seconds == pytest.approx(expected * computes_s)


def test_the_time_to_compare_by_has_its_ranges_unit():
    for low, high, usual, text in (
        (0, 0.5, 0.2, "under 1 s"), (12, 64, 31.4, "31 (12-64 s)"),
        (240, 1200, 600, "10.0 (4.0-20 min)"), (3600, 18_000, 7200, "2.0 (1.0-5.0 h)"),
    ):  # fmt: skip
        assert quantities.format_compared_time(usual, Span(low, high, "")) == text
