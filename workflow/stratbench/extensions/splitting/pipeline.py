"""Strategy `pipeline`: each worker computes consecutive layers (pipeline parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import option
from stratbench.extensions.splitting import declared
from stratbench.extensions.splitting.split import ModelSplit, format_divisible_model_names
from stratbench.strategies import base, collective
from stratbench.strategies.mesh import Mesh, MeshCoordinate, check_equal_groups
from stratbench.workload.network import models
from stratbench.workload.network.precision import create_autocast_context, get_batch_memory_format
from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from stratbench.extensions.splitting.pieces import Piece
    from stratbench.extensions.splitting.stages import MeasuredUnit, Stage, StageModule
    from stratbench.workload.network.models import Model

    #: Pieces of one stage, and the measured cost of each of its units.
    PiecesAndUnits = tuple[list[Piece], list[MeasuredUnit]]

#: Reason why a model with BatchNorm cannot be cut into pipeline stages.
BATCHNORM = (
    "BatchNorm would normalise over micro-batches instead of the batch, which changes the training"
)
#: Number of pipeline stages per worker, by the option `schedule`.
STAGES_PER_WORKER = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}


class Pipeline(ModelSplit):
    """Pipeline parallelism by torch.distributed.pipelining.

    Schedule `gpipe` computes all forwards, then all backwards (Huang et al., GPipe, 2019). `1f1b` computes a
    backward as soon as possible, so that a worker holds activations of at most as many micro-batches as there
    are stages (Narayanan et al., PipeDream, 2019). `interleaved` does the same with two stages per worker
    (Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021). `zero-bubble`
    also computes gradients of weights later than those of activations, when a worker would wait (Qi et al.,
    Zero bubble pipeline parallelism, 2024). Several pipelines are replicas: each gradient is averaged over
    them when it is complete.
    """

    parts_name = "stages"
    stated_by = "pipeline_modules"
    summary: ClassVar[str] = "layers one after the other on workers (pipeline parallelism)"
    rule: ClassVar[str] = (
        "As single, but each worker computes its own layers; a batch goes through them in micro-batches, "
        "whose gradients are added up"
    )
    breakdown_note: ClassVar[str] = (
        "bubble is the time within a step in which a worker waits for other stages, for gradients of "
        "replicas and for gradients of weights that two stages share; forward and backward are sums over "
        "a step's micro-batches for the worker's own stages"
    )
    collectives = ("send", "all_reduce", "broadcast")
    evaluated_on = "the stages' weights"

    @dataclass(frozen=True)
    class Options(base.Options):
        schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = option(
            "1f1b",
            "order in which a worker computes forwards and backwards of micro-batches",
            tried=["interleaved", "zero-bubble"],
        )
        microbatches: int = option(
            8,
            "number of micro-batches, the parts of a replica's batch that pass through the stages",
            least=1,
            tried=[4, 16],
            kind="micro-batch",
        )
        pipeline_parallel_size: int | Literal["all"] = option(
            "all",
            "number of workers that together hold one network; several such groups are replicas",
            least=1,
            tried=[2, 4],
            kind="pipeline",
        )

    def mesh(self, gpus: int) -> Mesh:
        chosen = self.options.pipeline_parallel_size
        workers = gpus if chosen == "all" else min(chosen, gpus)
        check_equal_groups(f"pipeline_parallel_size = {workers}", workers, gpus)
        return Mesh(gpus // workers, stages=workers)

    @property
    def num_batch_parts(self) -> int:
        return self.options.microbatches

    def bubble_share(self, gpus: int) -> float | None:
        """Return the predicted share of a step's time in which workers wait for other stages.

        The share is (S - 1) / (v m + S - 1). There are S workers, m micro-batches and v stages per worker
        (Narayanan et al., 2021, section 2.2). The result is None for zero-bubble, for which there is no
        formula.
        """
        o, workers = self.options, self.mesh(gpus).stages
        if o.schedule == "zero-bubble" and workers > 1:
            return None
        return (workers - 1) / (STAGES_PER_WORKER[o.schedule] * o.microbatches + workers - 1)

    @classmethod
    def check(cls, name: str, options: dict[str, Any], gpus: int, per_worker_batch: int) -> None:
        o = cls.Options(**options)
        workers = cls(o).mesh(gpus).stages
        if o.microbatches < workers:
            raise ValueError(
                f"microbatches = {o.microbatches}: is less than the {workers} workers of a pipeline, so "
                f"that some workers would always wait; set at least {workers}"
            )
        if STAGES_PER_WORKER[o.schedule] > 1 and o.microbatches % workers:
            raise ValueError(
                f"microbatches = {o.microbatches}: is not a multiple of the {workers} workers of a "
                f"pipeline, as schedule: {o.schedule} requires; set a multiple of {workers}"
            )
        if per_worker_batch % o.microbatches:
            raise ValueError(
                f"microbatches = {o.microbatches}: a replica's batch of {per_worker_batch} cannot be divided "
                "into so many equal parts; change microbatches or the batch"
            )

    @classmethod
    def indivisible_model_reason(cls, network: str | Model) -> str | None:
        if models.get_model_metadata(network).batchnorm:
            return BATCHNORM
        if not declared.has_pipeline_pieces(network):
            able = format_divisible_model_names(declared.has_pipeline_pieces)
            return f"it does not state its forward as pieces that can be cut into stages; {able}"
        return None

    def indivisible_among_workers_reason(self, network: str | Model, gpus: int) -> str | None:
        stages, max_stages = (
            self.count_pipeline_stages(gpus),
            models.get_model_metadata(network).max_pipeline_stages,
        )
        if max_stages is not None and stages > max_stages:
            return f"it can be cut into {max_stages} stages, not into {stages}; set pipeline_parallel_size"
        return None

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        yield from super().iter_refused_values(options, values)
        if values.get("slowdown"):
            yield (
                ".slowdown: is relative to the step time of the whole model, but each worker has only a "
                "part of the model; remove the key"
            )
        strategy = cls(cls.Options(**options))
        zero_bubble = strategy.options.schedule == "zero-bubble"
        if zero_bubble and values["activation_checkpointing"] == "selective":
            yield (
                ".activation_checkpointing = 'selective': schedule: zero-bubble computes backward in two "
                "parts, which would both ask for results that PyTorch keeps for one; set it to true, or "
                "choose another schedule"
            )
        for n in values["gpus"]:
            with suppress(ValueError):
                replicas = strategy.mesh(n).replicas
                weak, parts = values.get("per_worker_batch"), values["gradient_accumulation_steps"]
                batch = (weak * n if weak else values["global_batch"]) // replicas
                if (
                    parts > 1
                    and not batch % strategy.num_batch_parts
                    and batch % (parts * strategy.num_batch_parts)
                ):
                    yield (
                        f".gradient_accumulation_steps = {parts}: a part of a replica's batch of {batch} "
                        f"cannot be divided into {strategy.num_batch_parts} micro-batches; change it, "
                        "microbatches or the batch"
                    )

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        from stratbench.extensions.splitting import pieces

        network = models.get_model_or_name(worker.settings)
        if reason := self.indivisible_model_reason(network):
            yield reason
            return
        if worker.settings.own_model is None:
            return
        yield from super().iter_model_refusals(model, worker)
        if models.has_batchnorm(model):
            yield BATCHNORM
        try:
            chain = declared.make_declared_pieces(network, model)
        except ValueError as e:
            yield str(e)
            return
        yield from pieces.iter_unused_parameter_messages(model, chain)
        max_stages = len(
            pieces.group_pieces_into_indivisible_units(model, chain, worker.wrap_groups)
        )
        stages = self.count_pipeline_stages(worker.world_size)
        if stages > max_stages:
            yield f"it can be cut into {max_stages} stages, not into {stages}; set pipeline_parallel_size"

    def count_pipeline_stages(self, gpus: int) -> int:
        """Return the number of stages of a pipeline if the cell has `gpus` workers."""
        return self.mesh(gpus).stages * STAGES_PER_WORKER[self.options.schedule]

    def count_pending_microbatches_by_stage(self, stages: int) -> list[int]:
        """Return the largest number of micro-batches whose activations a stage holds, by stage."""
        most = self.options.microbatches
        if self.options.schedule == "gpipe":
            return [most] * stages
        return [min(most, stages - i) for i in range(stages)]

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh

        from stratbench.extensions.splitting.stages import StageModule

        coordinate = worker.mesh.get_coordinate(worker.rank)
        workers, replicas = worker.mesh.stages, worker.mesh.replicas
        mesh = init_device_mesh(
            worker.device.type, (workers, replicas), mesh_dim_names=("stages", "replicas")
        )
        self._pipe, self._copies = mesh.get_group("stages"), mesh.get_group("replicas")
        cut, n = (
            self.cut_model_into_stages(model, worker),
            self.count_pipeline_stages(worker.world_size),
        )
        #: Lists over all stages: pieces, floating-point operations per sample, and output shape per sample.
        self._cut = [pieces for pieces, _ in cut]
        self._work = [sum(u.flops for u in units) for _, units in cut]
        self._shapes = [units[-1].shape for _, units in cut]
        self._dtype = next(model.parameters()).dtype
        layout = get_batch_memory_format(worker.settings.precision, worker.device.type)
        precision = partial(create_autocast_context, worker.settings.precision, worker.device)
        shared = self._find_parameters_of_several_stages(model)
        self._drop_parameters_of_other_stages(
            model, [i for i in range(n) if i % workers == coordinate.stage]
        )
        #: Modules of each stage of this worker, by the stage's number.
        self._parts: dict[int, StageModule] = {
            i: StageModule(model, self._cut[i], i == n - 1, self._dtype, layout, precision)
            for i in range(coordinate.stage, n, workers)
        }
        self._connect_stages()
        self._stages: list[Stage] = []
        self._schedule, self._batch = None, 0
        self._sent: set[nn.Parameter] = set()
        # The stage that uses each parameter. A parameter of several stages is left out, because its gradient
        # is complete only after all of these stages.
        self._by_stage = {
            p: i for i, part in self._parts.items() for p in part.held if p not in shared
        }
        self._ending: int | None = None
        if replicas > 1 and self.options.schedule != "zero-bubble":
            for p in self._by_stage:
                p.register_post_accumulate_grad_hook(self._average_gradient_if_complete)
        return model

    def cut_model_into_stages(self, model: nn.Module, worker: base.Worker) -> list[PiecesAndUnits]:
        """Cut the model into stages of similar work.

        The result has, for each stage, its pieces and the costs of its units.
        """
        from stratbench.extensions.splitting.pieces import group_pieces_into_indivisible_units
        from stratbench.extensions.splitting.stages import choose_unit_count_per_stage

        pieces = declared.make_declared_pieces(models.get_model_or_name(worker.settings), model)
        units = group_pieces_into_indivisible_units(model, pieces, worker.wrap_groups)
        measured = self.measure_unit_costs_on_fake_tensors(model, units)
        waiting = self.count_pending_microbatches_by_stage(
            self.count_pipeline_stages(worker.world_size)
        )
        ends = [0, *accumulate(choose_unit_count_per_stage(measured, waiting))]
        return [(list(chain(*units[i:j])), measured[i:j]) for i, j in pairwise(ends)]

    def _connect_stages(self) -> None:
        """Connect the workers of neighbouring stages by sending one value between them.

        NCCL connects two workers at their first send.
        """
        import torch
        import torch.distributed as dist

        rank, workers = dist.get_rank(self._pipe), self.worker.mesh.stages
        nothing = torch.zeros(1, device=self.worker.device)
        dist.all_reduce(nothing, group=self._pipe)
        for i in range(len(self._cut) - 1 if workers > 1 else 0):
            sender, receiver = i % workers, (i + 1) % workers
            if rank == sender:
                dist.send(nothing, dist.get_global_rank(self._pipe, receiver), group=self._pipe)
            elif rank == receiver:
                dist.recv(nothing, dist.get_global_rank(self._pipe, sender), group=self._pipe)

    def measure_unit_costs_on_fake_tensors(
        self, model: nn.Module, units: list[list[Piece]]
    ) -> list[MeasuredUnit]:
        """Return the cost of each unit of the model, computed on fake tensors.

        Raises:
            ModelError: If forward needs values of tensors, which fake tensors do not have.
        """
        import torch

        from stratbench.extensions.splitting.stages import measure_unit_costs
        from stratbench.workload.data.device_data import make_example_batch
        from stratbench.workload.known_values import ASKS_FOR_VALUES, KnownValueFakeMode
        from stratbench.workload.torch_internals import unset_fake_temporarily

        like = next(model.parameters())
        cpu, layout = torch.device("cpu"), torch.contiguous_format
        # `stratbench plan` calls this method within a fake-tensor mode. The new mode must not be nested in
        # that one.
        with unset_fake_temporarily(), KnownValueFakeMode():
            x, _ = make_example_batch(1, self.worker.input_shape, 1, cpu, like.dtype, layout)
            try:
                return measure_unit_costs(model, units, x)
            except ASKS_FOR_VALUES as e:
                raise ModelError(
                    f"model {self.worker.settings.model!r}: pipeline measures its layers on tensors without "
                    f"values, but forward reads values of tensors ({e.func}); if the model has experts of "
                    "transformers, set arguments: {experts_implementation: batched_mm}"
                ) from e

    def _find_parameters_of_several_stages(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that several stages use. Create process groups to add their gradients."""
        import torch.distributed as dist

        mesh, rank = self.worker.mesh, self.worker.rank
        users: dict[nn.Parameter, list[int]] = {}
        for i, pieces in enumerate(self._cut):
            for p in dict.fromkeys(
                p for piece in pieces for p in piece.iter_used_parameters(model)
            ):
                users.setdefault(p, []).append(i)
        several = {p: stages for p, stages in users.items() if len(stages) > 1}
        #: For each parameter that several workers use: the process group of these workers.
        self._tied: dict[nn.Parameter, ProcessGroup] = {}
        #: Parameters that several workers use, and whose gradient another worker includes in the gradient
        #: norm.
        self._counted_elsewhere: set[nn.Parameter] = set()
        groups: dict[tuple[int, ...], ProcessGroup] = {}
        for p, stages in several.items():
            workers = tuple(sorted({i % mesh.stages for i in stages}))
            if len(workers) == 1:
                continue
            for replica in range(mesh.replicas):
                ranks = tuple(mesh.get_rank(MeshCoordinate(replica, w, 0)) for w in workers)
                if ranks not in groups:
                    groups[ranks] = dist.new_group(list(ranks))
                if rank in ranks:
                    self._tied[p] = groups[ranks]
                    if rank != ranks[0]:
                        self._counted_elsewhere.add(p)
        return set(several)

    def _drop_parameters_of_other_stages(self, model: nn.Module, own_stages: list[int]) -> None:
        """Remove the parameters that no stage of this worker uses, to free their memory."""
        used = {
            p
            for i in own_stages
            for piece in self._cut[i]
            for p in piece.iter_used_parameters(model)
        }
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if p not in used:
                    setattr(module, name, None)

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        from stratbench.workload.torch_internals import list_receive_buffers

        return {"received": list_receive_buffers(self._stages)}

    def _get_microbatch_schedule(self, batch_samples: int) -> Any:
        """Return the schedule of micro-batches for a batch of `batch_samples` samples.

        A new schedule is made if the number of samples changes.
        """
        if batch_samples != self._batch:
            self._batch = batch_samples
            self._schedule = self.make_microbatch_schedule(batch_samples)
        return self._schedule

    def free_batch_dependent_memory(self) -> None:
        """Free the pipeline's schedule and buffers, which depend on the batch size."""
        self._schedule, self._stages, self._batch = None, [], 0

    def make_microbatch_schedule(self, batch_samples: int) -> Any:
        """Make this worker's stages and their schedule of micro-batches, for one batch size.

        The receive buffers are allocated in the first step.
        """
        from stratbench.extensions.splitting.stages import SCHEDULES
        from stratbench.workload.torch_internals import disable_pipeline_shape_exchange

        o = self.options
        self._stages = [
            self._make_pipeline_stage(i, batch_samples // o.microbatches) for i in self._parts
        ]
        kind = SCHEDULES[o.schedule]
        stages = self._stages if STAGES_PER_WORKER[o.schedule] > 1 else self._stages[0]
        # Gradients need no scaling, because the loss is already divided by the number of micro-batches.
        schedule = kind(
            stages, o.microbatches, loss_fn=self._compute_microbatch_loss, scale_grads=False
        )
        disable_pipeline_shape_exchange(schedule)
        return schedule

    def _make_pipeline_stage(self, stage_number: int, microbatch_samples: int) -> Stage:
        from stratbench.extensions.splitting.stages import Stage

        stage = Stage(
            self._parts[stage_number], stage_number, len(self._cut), self.worker.device,
            input_args=self._make_example_output(stage_number - 1, microbatch_samples),
            output_args=self._make_example_output(stage_number, microbatch_samples), group=self._pipe,
        )  # fmt: skip
        stage.mark, stage.last = (
            lambda phase: self.worker.mark_phase_end(phase),
            partial(self._store_stage_that_ends_backward, stage_number),
        )
        return stage

    def _make_example_output(self, stage_number: int, samples: int) -> Tensor:
        """Return a tensor shaped like a stage's output for a number of samples.

        Stage number -1 stands for the model's input.
        """
        import torch

        from stratbench.workload.data.device_data import make_example_batch

        device, layout = self.worker.device, torch.contiguous_format
        if stage_number < 0:
            return make_example_batch(
                samples, self.worker.input_shape, 1, device, self._dtype, layout
            )[0]
        shape = (samples, *self._shapes[stage_number])
        return torch.empty(shape, dtype=self._dtype, device=device).requires_grad_()

    def _store_stage_that_ends_backward(self, stage: int, is_last_backward: bool) -> None:
        self._ending = stage if is_last_backward and self._is_last else None

    def _compute_microbatch_loss(self, scores: Tensor, y: Tensor) -> Tensor:
        self.worker.mark_phase_end("bubble")
        with create_autocast_context(self.worker.settings.precision, self.worker.device):
            loss = self.compute_batch_part_loss(scores, y) / self._divisor
        self._losses.append(loss.detach())
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self.worker.mark_phase_end("forward")
        return loss

    def add_batch_part_gradients(
        self, x: Tensor, y: Tensor, parts: int = 1, is_last_part: bool = True
    ) -> Tensor:
        import torch

        self._divisor, self._losses = parts * self.options.microbatches, []
        if self.scaler is not None:
            # GradScaler creates its scale at the first call. Only the last stage's worker calls it in the
            # step.
            self.scaler.scale(torch.zeros((), device=self.worker.device))
        schedule = self._get_microbatch_schedule(len(x))
        inputs = (x,) if 0 in self._parts else ()
        target = y if len(self._cut) - 1 in self._parts else None
        schedule.step(*inputs, target=target, return_outputs=False)
        for stage in self._stages:
            # Free the gradients that were sent to other stages. PyTorch would keep them until the next step.
            stage.clear_runtime_states()
        if self.options.schedule == "zero-bubble":
            self._match_gradient_strides()
        if not self._losses:
            return torch.zeros((), dtype=self._dtype, device=self.worker.device)
        return torch.stack(self._losses).sum()

    def _match_gradient_strides(self) -> None:
        """Give gradients the strides of their parameters, which fused optimizers require.

        Backward does so by itself, except if gradients of weights are computed separately.
        """
        import torch

        for p in self.parameters:
            if p.grad is not None and p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)

    def _average_gradient_if_complete(self, parameter: nn.Parameter) -> None:
        """Start to average a gradient over the replicas once the gradient is complete (gradient hook)."""
        if self._by_stage.get(parameter) == self._ending is not None:
            self._start_gradient_averaging(parameter, self._copies)

    def _start_gradient_averaging(self, parameter: nn.Parameter, group: ProcessGroup) -> None:
        self._sent.add(parameter)
        super()._start_gradient_averaging(parameter, group)

    def assign_gradients_to_updated_tensors(self) -> None:
        import torch.distributed as dist

        for p, group in self._tied.items():
            dist.all_reduce(p.grad, group=group)
        if self.worker.mesh.replicas > 1:
            for p in self.parameters:
                if p not in self._sent:
                    self._start_gradient_averaging(p, self._copies)
            self._wait_for_averaged_gradients()
            self._sent.clear()
        self.worker.mark_phase_end("bubble")

    def list_tensors_for_gradient_norm(self) -> list[Tensor]:
        return [p for p in self.parameters if p not in self._counted_elsewhere]

    def gradient_norm(self) -> Tensor:
        return collective.compute_norm_over_shards(
            super().gradient_norm(), self.worker.mesh.stages, self._pipe
        )

    @contextmanager
    def open_evaluation_model(self) -> Iterator[Callable[[Tensor], Tensor]]:
        with super().open_evaluation_model():
            yield self._compute_evaluation_scores

    def _compute_evaluation_scores(self, x: Tensor) -> Tensor:
        """Return the model's scores for a batch in evaluation.

        The worker of the last stage gets the scores, and other workers get zeros. All workers must call it.
        """
        import torch
        import torch.distributed as dist

        samples, last, workers = len(x), len(self._cut) - 1, self.worker.mesh.stages
        for i, part in self._parts.items():
            if i and (i - 1) not in self._parts:
                x = torch.empty_like(self._make_example_output(i - 1, samples), requires_grad=False)
                dist.recv(x, dist.get_global_rank(self._pipe, (i - 1) % workers), group=self._pipe)
            x = part.compute_stage_output(x)
            if i != last and (i + 1) not in self._parts:
                dist.send(x, dist.get_global_rank(self._pipe, (i + 1) % workers), group=self._pipe)
        if last in self._parts:
            return x
        return torch.zeros(samples, *self._shapes[-1], dtype=self._dtype, device=self.worker.device)

    def report(self) -> dict[str, Any]:
        report = super().report()
        report["details"] |= {
            "stages": [
                {"pipeline_modules": [p.name for p in pieces], "forward_flops_per_sample": flops}
                for pieces, flops in zip(self._cut, self._work, strict=True)
            ],
            "predicted_bubble_share": self.bubble_share(self.worker.world_size),
        }
        return report
