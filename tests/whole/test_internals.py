"""Private and undocumented names of PyTorch and Snakemake that the product uses are there.

A version in which one is missing fails here, in seconds, and not in the middle of a study.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from stratbench.workload.torch_internals import PIPELINE_VOTES

#: Module -> names, each an attribute of an attribute.
TORCH = {
    "torch": [
        "_C._ExcludeDispatchKeyGuard",
        "_amp_foreach_non_finite_check_and_unscale_",
        "_debug_has_internal_overlap",
        "_foreach_mul_",
        "Tensor._backward_hooks",
        "Tensor._is_view",
        "Tensor._post_accumulate_grad_hooks",
        "Tensor._version",
        "UntypedStorage._cdata",
        "library.Library._destroy",
        "ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "ops.aten.add.Tensor._schema",
    ],
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
        "ProcessGroup._wait_for_pending_works",
        "ProcessGroup.unbox",
    ],
    "torch.amp": ["GradScaler._unscale_grads_"],
    "torch.distributed.tensor._sharding_prop": [
        "ShardingPropagator._propagate_tensor_meta_non_cached"
    ],
    "torch.nn.init": ["_no_grad_trunc_normal_"],
    "torch.distributed.fsdp._fully_shard._fsdp_param": ["_chunk_with_empty"],
    "torch.nn.modules.batchnorm": ["_BatchNorm"],
    "torch.nn.modules.dropout": ["_DropoutNd"],
    "torch.nn.parallel": [
        "DistributedDataParallel._get_ddp_logging_data",
        "DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
    ],
    "torch.testing._internal.distributed.fake_pg": ["FakeStore"],
    "torch.utils._python_dispatch": ["TorchDispatchMode", "_disable_current_modes"],
    "torch.utils._pytree": ["tree_leaves"],
    "torch.utils.flop_counter": [
        "flop_registry",
        "sdpa_backward_flop_count",
        "sdpa_flop_count",
        "shape_wrapper",
    ],
}
SNAKEMAKE = {
    "snakemake.cli": ["main"],  # the first that is imported: others do not go by themselves
    "snakemake.dag": ["DAG.reason", "DAG.needrun", "DAG.needrun_jobs"],
    "snakemake.jobs": ["Job.log_error"],
    "snakemake.persistence": [
        "PersistenceBase.finished",
        "PersistenceBase.has_metadata",
        "PersistenceBase.incomplete",
        "PersistenceBase.unlock",
    ],
    "snakemake.scheduling.job_scheduler": [
        "JobScheduler.error_callback",
        "JobScheduler.exit_gracefully",
        "JobScheduler.run",
    ],
    "snakemake.settings.types": ["DeploymentMethod.CONDA"],
    "snakemake.workflow": [
        "Workflow.async_run",
        "Workflow.current_basedir",
        "Workflow.is_main_process",
        "Workflow.local_exec",
    ],
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
    from stratbench.extensions.splitting.stages import SCHEDULES

    for kind in SCHEDULES.values():
        assert [name for name in PIPELINE_VOTES if hasattr(kind, name)], kind


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("snakemake.dag", "self.forcefiles"),
        ("snakemake.scheduling.job_scheduler", "self._executor"),
        ("snakemake.scheduling.job_scheduler", "self.failed"),
        ("snakemake.workflow", "    config_settings: "),
        ("snakemake.workflow", "    deployment_settings: "),
    ],
)
def test_an_object_of_snakemakes_has_what_is_read_of_it(module: str, text: str) -> None:
    assert text in inspect.getsource(importlib.import_module(module))


def test_snakemakes_executor_has_what_follows_jobs() -> None:
    from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

    source = inspect.getsource(RemoteExecutor)
    # What is yielded is kept, and nothing else; the wait between two requests is `sleep`.
    for line in ("self.active_jobs.extend(still_active_jobs)", "await self.sleep()", "self.wait"):
        assert line in source
    report = inspect.signature(RemoteExecutor.report_job_submission)
    assert list(report.parameters) == ["self", "job_info", "register_job"]


WORKFLOW = Path(__file__).parents[2] / "workflow"
#: The files that may name them, below the package.
INTERNALS = {
    "workload/torch_internals.py",
    "extensions/plan/footprint/torch_internals.py",
    "study/snakemake_internals.py",
}
#: Names of other libraries: each library's are in one file.
OTHERS = {
    "extensions/deepspeed/strategy.py": {
        "_DATA_PARALLEL_GROUP",
        "_WORLD_GROUP",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
        "_partition_all_parameters",
        "_post_step",
    },
    "extensions/libraries/hugging_face.py": {"_model_mapping", "_pp_plan", "_tp_plan"},
    "workload/network/torchvisions.py": {"_process_input"},
}
#: Documented although they begin with an underscore: of Python.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"}
#: Undocumented although they do not.
UNDOCUMENTED = {
    "args_recv_info",
    "distributed_c10d",
    "flop_registry",
    "grad_recv_info",
    "sdpa_backward_flop_count",
    "sdpa_flop_count",
    "shape_wrapper",
    "forcefiles",
    "needrun",
    "persistence",
    "scheduler",
    "shellcmd",
}
#: Attributes of Snakemake's `workflow` that it documents.
OF_WORKFLOW = {"executor_settings"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED


def own_names(trees: list[ast.Module]) -> Counter[str]:
    """Private names that the package defines, with how often."""
    found: Counter[str] = Counter()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] += 1
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            found[node.id if isinstance(node, ast.Name) else node.attr] += is_own
    return found


def private_attributes(tree: ast.Module) -> set[str]:
    """Private names that a module asks of objects other than its own."""
    attributes = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_private(n.attr))
    return {n.attr for n in attributes if ast.unparse(n.value) not in ("self", "cls", "super()")}


def foreign_names(tree: ast.Module, own: Counter[str], listed: set[str]) -> set[str]:
    """Private and undocumented names of other packages that a module uses.

    Args:
        tree: The module.
        own: As `own_names` gives them.
        listed: Names that are another package's although ours has such a one, too.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            # A method that one class alone defines, and calls of its base, is the base's.
            of = ast.unparse(node.value)
            is_foreign = own[node.attr] - (of == "super()") < 1
            is_foreign |= node.attr in listed and of not in ("self", "cls", "super()")
            if (is_private(node.attr) and is_foreign) or node.attr in UNDOCUMENTED:
                found.add(node.attr)
            if ast.unparse(node.value).rpartition(".")[2] == "workflow":
                found |= {node.attr} - OF_WORKFLOW
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if not module.startswith("stratbench") and module != "__future__":
                parts = [*module.split("."), *(p for a in node.names for p in a.name.split("."))]
                found |= {p for p in parts if is_private(p) or p in UNDOCUMENTED}
    return found


@pytest.mark.slow
def test_private_names_are_in_a_file_of_each_library() -> None:
    """An upgrade of PyTorch or Snakemake asks for a look into three files."""
    package = WORKFLOW / "stratbench"
    trees = {
        path.relative_to(package).as_posix(): ast.parse(path.read_text())
        for path in sorted(package.rglob("*.py"))
    }
    own = own_names(list(trees.values()))
    listed = set().union(*(private_attributes(trees[path]) for path in INTERNALS))
    found = {path: foreign_names(tree, own, listed) for path, tree in trees.items()}
    assert all(found[path] for path in INTERNALS)
    found = {path: names for path, names in found.items() if names and path not in INTERNALS}
    assert found == OTHERS


def test_rules_name_nothing_that_snakemake_does_not_document() -> None:
    used = {
        (path.name, name)
        for path in sorted((WORKFLOW / "rules").glob("*.smk"))
        for name in re.findall(r"\b(workflow\.\w+|job\.rule\b|\w+\.rule\.\w+)", path.read_text())
        if name != "workflow.rst"
    }
    # Before the package is found, which it finds.
    assert used == {("package.smk", "workflow.current_basedir")}


def test_a_private_name_is_found() -> None:
    text = """
from torch._ops import OpOverload
class A(GradScaler):
    def _unscale(self): return super()._unscale()
    def _own(self): return self._own() or t._cdata or os._exit(0) or workflow.dag or t._version
    def _keep(self): self._version = 1
"""
    tree = ast.parse(text)
    found = foreign_names(tree, own_names([tree]), {"_version"})
    assert found == {"_ops", "_unscale", "_cdata", "_version", "dag"}
