"""Private and undocumented names of PyTorch and Snakemake that the product uses are there.

A version in which one is missing fails here, in seconds, and not in the middle of a study.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from stratbench.strategies.splitting.pipeline import VOTES

#: Module -> names, each an attribute of an attribute.
TORCH = {
    "torch": ["_amp_foreach_non_finite_check_and_unscale_", "ops.aten.add.Tensor._schema"],
    "torch._dynamo": ["callback.callback_handler", "config"],
    "torch._inductor": ["config"],
    "torch._subclasses.fake_tensor": [
        "FakeTensorMode._cache_key",
        "FakeTensorMode._dispatch_impl",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "unset_fake_temporarily",
    ],
    "torch._subclasses.fake_impls": ["register_op_impl"],
    "torch.distributed": ["_compute_bucket_assignment_by_size"],
    "torch.distributed.device_mesh": ["DeviceMesh._concatenate", "init_device_mesh"],
    "torch.distributed.distributed_c10d": [
        "_abort_process_group",
        "_resolve_process_group",
        "_set_pg_timeout",
        "ProcessGroup.unbox",
    ],
    "torch.distributed.fsdp._fully_shard._fsdp_param": ["_chunk_with_empty"],
    "torch.nn.modules.batchnorm": ["_BatchNorm"],
    "torch.nn.modules.dropout": ["_DropoutNd"],
    "torch.nn.parallel": ["DistributedDataParallel._set_ddp_runtime_logging_sample_rate"],
    "torch.testing._internal.distributed.fake_pg": ["FakeStore"],
    "torch.utils._python_dispatch": ["TorchDispatchMode"],
    "torch.utils._pytree": ["tree_leaves"],
    "torch.utils.flop_counter": ["flop_registry"],
}
SNAKEMAKE = {
    "snakemake.cli": ["main"],  # the first that is imported: others do not go by themselves
    "snakemake.dag": ["DAG.reason", "DAG.needrun", "DAG.needrun_jobs"],
    "snakemake.jobs": ["Job.log_error"],
    "snakemake.persistence": ["PersistenceBase.incomplete", "PersistenceBase.finished"],
    "snakemake.workflow": ["Workflow.async_run", "Workflow.current_basedir"],
    "snakemake_interface_executor_plugins.executors.base": ["SubmittedJobInfo"],
    "snakemake_interface_executor_plugins.executors.remote": [
        "RemoteExecutor.cancel_jobs",
        "RemoteExecutor.check_active_jobs",
        "RemoteExecutor.next_seconds_between_status_checks",
        "RemoteExecutor.report_job_error",
        "RemoteExecutor.report_job_submission",
        "RemoteExecutor.report_job_success",
        "RemoteExecutor.run_job",
        "RemoteExecutor.shutdown",
        "RemoteExecutor.sleep",
    ],
    "snakemake_executor_plugin_slurm": ["Executor.run_job", "Executor.shutdown"],
}


@pytest.mark.parametrize(
    ("module", "name"),
    [(m, n) for names in (TORCH, SNAKEMAKE) for m, each in names.items() for n in each],
)
def test_a_private_name_is_there(module: str, name: str) -> None:
    at = pytest.importorskip(module) if "slurm" in module else importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(at, part), f"{module}: {name} is gone"
        at = getattr(at, part)


def test_stages_have_one_of_the_votes() -> None:
    """Set on a schedule that never calls it, a method would be silently dead."""
    from stratbench.strategies.splitting.stages import SCHEDULES

    for kind in SCHEDULES.values():
        assert [name for name in VOTES if hasattr(kind, name)], kind


def test_snakemakes_executor_has_what_follows_jobs() -> None:
    from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

    source = inspect.getsource(RemoteExecutor)
    # What is yielded is kept, and nothing else; the wait between two requests is `sleep`.
    for line in ("self.active_jobs.extend(still_active_jobs)", "await self.sleep()", "self.wait"):
        assert line in source
    report = inspect.signature(RemoteExecutor.report_job_submission)
    assert list(report.parameters) == ["self", "job_info", "register_job"]
