"""The same training by Accelerate.

torchrun --nproc-per-node 2 -m stratbench.train.commands.trainers.accelerated --model vgg-compact --data ...

`accelerate launch` starts the same, but on CPUs no two processes.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

from stratbench.report import Report
from stratbench.train.commands.trainers.work import Work, parse_arguments


def main() -> None:
    """Train by the command line, and report it."""
    args = parse_arguments()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    work = Work(args, accelerator.device, accelerator.process_index, accelerator.num_processes)
    optimizer = torch.optim.SGD(work.model.parameters(), args.lr, args.momentum)
    model, optimizer = accelerator.prepare(work.model, optimizer)
    work.warm_up(model)
    accelerator.wait_for_everyone()
    report = Report(parameters=work.parameters)
    for epoch in range(args.epochs):
        for x, y in work.batches(epoch):
            loss = work.task.loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            report.step(args.batch, loss.detach())
        report.pause()
        score, test_loss, error = work.evaluate()
        accelerator.wait_for_everyone()
        report.score(score, test_loss, error)
    accelerator.end_training()


if __name__ == "__main__":
    main()
