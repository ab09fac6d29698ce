"""Counting what travels in one step: the number and the bytes of collectives, whoever starts them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.strategies.toys import BATCH, DATA, NETWORKS, STRATEGIES, TASKS, Case, ToyData, make_optimizer
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.learning.optimizer import parameter_groups
from trainer.strategies.machine import Machine


def collectives_of_a_step(launch: Launch, case: Case) -> list[tuple[str, int]]:
    """(name, bytes) of every collective of one training step, the third, in order. DDP starts its own from C++."""
    torch.manual_seed(case.seed)
    network, task, data = NETWORKS[case.network](), TASKS[case.task](), DATA.get(case.task, ToyData)()
    with STRATEGIES[case.strategy](machine=Machine(launch=launch, device="cpu"), **case.fields) as strategy:
        stream = TrainLoader(data, data.train(), strategy.slice, BATCH, case.micro_batches, LoaderOptions())
        parallel_model = strategy.build(task, network, stream.example())
        optimizer = parallel_model.optimizer(
            make_optimizer("adamw"), parameter_groups(parallel_model.network, spare_vectors=False)
        )
        for step, batches in zip(range(3), stream.epoch(0), strict=False):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
                parallel_model.forward_backward(batches, step)
                parallel_model.optimizer_step(optimizer, None)
                if dist.is_initialized():
                    dist.barrier()  # a gradient may be there just before its event ends, and what has no end is lost
    return sorted(
        (event.name, _bytes(event.input_shapes))
        for event in recorded.events()
        if event.name.startswith("gloo:") and event.name != "gloo:barrier"
    )


def _bytes(shapes: list[Any]) -> int:
    """Float32 elements of the tensors that an event was given."""
    return 4 * sum(math.prod(shape) for shape in shapes if shape and all(isinstance(size, int) for size in shape))
