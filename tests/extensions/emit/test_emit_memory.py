"""Files of `stratbench emit` take their cell's memory, within 3 %, for its losses, on 2 CPU processes.

`make test-transformers` runs what needs Accelerate, transformers or Lightning. Without them that is skipped.
"""

from __future__ import annotations

import os
import re
from importlib import util
from pathlib import Path

import pytest
from emitting import MALLOC
from test_emit_trains import ADAMW, emit, losses_of_cell, run, trained

from stratbench.workload.data import prepared
from stratbench.workload.data.prepare import prepare_data_set

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
#: 86 million parameters in blocks, beside which what else a process holds changes little.
NETWORK = {
    **ADAMW, "model": "gpt2-small", "dataset": "text", "epochs": 1, "warmup_steps": 1, "global_batch": 4,
    "per_worker_batch": 2,
}  # fmt: skip
TEXT = {"source": "markov-text", "train_samples": 12, "test_samples": 4, "sequence": 16}
#: A script's beginning. Its peak is measured as the cell's is, without what was in memory before.
START = """
import os
import sys
import torch
from stratbench.extensions.emit.work import Work
from stratbench.telemetry.memory import MemoryMeter
from stratbench.workload.network import models

models.import_torchvision()
torch.set_num_threads(1)
file, record, data = sys.argv[1:]
rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))


def measured(batches):
    for number, batch in enumerate(batches):
        if number == 1:
            meter.start()
        yield batch


losses = []


def loss_of(outputs, targets):
    loss = work.loss(outputs, targets)
    losses.append(loss.item())
    return loss


def tell():
    found = meter.read_memory_since_start()
    size = found["peak_bytes"] - found["idle_bytes"]
    print(f"took {size} bytes for {sum(losses) / len(losses)}", flush=True)


"""
ACCELERATE = """
from accelerate import Accelerator, DistributedDataParallelKwargs

ddp = DistributedDataParallelKwargs(bucket_cap_mb=25, gradient_as_bucket_view=True)
accelerator = Accelerator(kwargs_handlers=[ddp])
{sharded}
meter = MemoryMeter("cpu")
work = Work(record, data, rank, accelerator.device)
optimizer = torch.optim.AdamW(
    work.model.parameters(), lr=0.003, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.0, fused=True
)
model, optimizer = accelerator.prepare(work.model, optimizer)
for x, y in measured(work.batches(0)):
    accelerator.backward(loss_of(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
tell()
"""
#: Accelerate shards on GPUs alone. Its own code does so here, since torch's takes CPU processes, too.
SHARDED = """
import yaml
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

for name, value in yaml.safe_load(open(file))["fsdp_config"].items():
    name = name.replace("fsdp_transformer_layer_cls_to_wrap", "fsdp_transformer_cls_to_wrap")
    os.environ[name.upper()] = str(value)
accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
assert accelerator.is_fsdp2
"""
TRAINER = """
from transformers import Trainer

exec(open(file).read())
args.report_to = []


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = work.model

    def forward(self, x, y):
        return {{"loss": loss_of(self.model(x), y)}}


class Batches:
    def __len__(self):
        return 3

    def __iter__(self):
        return measured({{"x": x, "y": y}} for x, y in work.batches(0))


class OwnTrainer(Trainer):
    def get_train_dataloader(self):
        return Batches()


meter = MemoryMeter("cpu")
work = Work(record, data, rank, torch.device("cpu"))
trainer = OwnTrainer(model=Network(), args=args)
{prepared}
trainer.train()
tell()
"""
#: As the note in the file says.
VIEWED = "trainer.accelerator.ddp_handler.gradient_as_bucket_view = True"
#: The Trainer takes Accelerate's state, which has no sharding without a GPU.
TRAINER_SHARDED = """
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

state = trainer.accelerator.state
state.distributed_type = DistributedType.FSDP
state.fsdp_plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
trainer.is_fsdp_enabled = True
assert trainer.accelerator.is_fsdp2
"""
LIGHTNING = """
from lightning.pytorch import LightningModule

exec(open(file).read())


class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = work.model

    def training_step(self, batch, number):
        x, y = batch
        return loss_of(self.model(x), y)


class Batches:
    def __iter__(self):
        return measured(work.batches(0))


for name in ("configure_model", "configure_optimizers", "optimizer_step"):
    if name in globals():
        setattr(Network, name, globals()[name])
meter = MemoryMeter("cpu")
work = Work(record, data, rank, torch.device("cpu"))
trainer.fit(Network(), Batches())
tell()
"""
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
LAUNCH = ("accelerate.commands.launch", "--main_process_port", "0", "--config_file")
#: Target and strategy -> the package that it needs, and the script's end.
SCRIPTS = {
    ("accelerate", "ddp"): ("accelerate", ACCELERATE.format(sharded="")),
    ("accelerate", "fsdp"): ("accelerate", ACCELERATE.format(sharded=SHARDED)),
    ("trainer", "ddp"): ("transformers", TRAINER.format(prepared=VIEWED)),
    ("trainer", "fsdp"): ("transformers", TRAINER.format(prepared=TRAINER_SHARDED)),
    ("lightning", "ddp"): ("lightning", LIGHTNING),
    ("lightning", "fsdp"): ("lightning", LIGHTNING),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "text"
    prepare_data_set("text", folder, spec=TEXT)
    return folder


@pytest.mark.parametrize(("target", "strategy"), SCRIPTS)
def test_the_file_takes_the_cells_memory_for_its_losses(
    start_cell, text, tmp_path, monkeypatch, target, strategy
):
    package, end = SCRIPTS[target, strategy]
    if util.find_spec(package) is None:
        pytest.skip(f"pip install {package}")
    monkeypatch.setattr(os, "environ", os.environ | MALLOC)

    def start(settings):
        return start_cell(settings, data_dir=text)

    changes = NETWORK | {"data_spec": prepared.read_unverified_metadata(text)["spec"]}
    launched = trained(start, strategy, {}, changes)
    file = emit(launched, target, tmp_path)
    file = file.rename(tmp_path / f"emitted{file.suffix}")
    (tmp_path / "script.py").write_text(START + end)
    way = TORCHRUN
    if (target, strategy) == ("accelerate", "ddp"):
        way = (*LAUNCH, file, "script.py")
    output = run(*way, file, launched.record, text, folder=tmp_path)
    found = re.findall(r"took (\d+) bytes for ([\d.]+)", output)
    assert len(found) == 2, output
    [loss] = losses_of_cell(launched)
    assert sum(float(own) for _, own in found) / 2 == pytest.approx(loss, rel=2e-5)
    took = [int(size) for size, _ in found]
    workers = [worker["memory"] for worker in launched.read_record()["workers"]]
    of_cell = [m["peak_bytes"] - m["idle_bytes"] for m in workers]
    assert max(took) == pytest.approx(max(of_cell), rel=0.03), (took, of_cell)
