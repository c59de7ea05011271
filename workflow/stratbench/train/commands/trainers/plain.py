"""A plain PyTorch trainer: torchrun and DistributedDataParallel.

torchrun --nproc-per-node 2 -m stratbench.train.commands.trainers.plain --model vgg-compact --data ...
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stratbench.report import Report
from stratbench.train.commands.trainers.work import Work, parse_arguments


def main() -> None:
    """Train by the command line, and report it."""
    args, local_rank = parse_arguments(), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    work = Work(args, device, dist.get_rank(), dist.get_world_size())
    model = DistributedDataParallel(work.model, device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    work.warm_up(model)
    dist.barrier()
    report = Report(parameters=work.parameters)
    for epoch in range(args.epochs):
        for x, y in work.batches(epoch):
            loss = work.task.loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            report.step(args.batch, loss.detach())
        report.pause()
        score, test_loss, error = work.evaluate()
        dist.barrier()
        report.score(score, test_loss, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
