"""What a strategy would use, computed from the trial of another one: an estimate for which nothing is run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from trainer.jobs.batch_sizes import BatchSizes
from trainer.jobs.plan.ledger import Peak
from trainer.jobs.plan.traffic import Collective
from trainer.jobs.plan.trial import RankUsage
from trainer.learning.parallel_plan import Plan
from trainer.parallel.meta_model import named_state
from trainer.parallel.module_units import find_units, matching_modules
from trainer.strategies.candidates import Division


@dataclass(frozen=True)
class NetworkSizes:
    """Bytes of a network's parts."""

    weights: int
    trained: int  # of them
    cut: int  # of the layers that tensor ranks divide
    largest_unit: int  # of those that are gathered at once


@dataclass(frozen=True)
class Base:
    """The trial that others are computed from: copies of the whole network, each with its samples."""

    usage: RankUsage
    batches: BatchSizes


def measure_network(network: nn.Module, plan: Plan) -> NetworkSizes:
    """The sizes of a network, which may be on the meta device."""
    cut = {module for key in plan.tensor for _, module in matching_modules(network, key)}
    units = [network.get_submodule(name) for name in find_units(network, plan)]
    weights = sum(tensor.nbytes for tensor in {tensor for _, tensor in named_state(network)})
    return NetworkSizes(
        weights=max(1, weights),
        trained=sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad),
        cut=sum(_bytes(module) for module in cut),
        # what lies in no unit is gathered, too
        largest_unit=max([_bytes(unit) for unit in units], default=weights),
    )


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def estimate_usage(
    division: Division, batches: BatchSizes, processes: int, per_machine: int, base: Base, sizes: NetworkSizes
) -> RankUsage:
    """What a rank uses of a strategy that divides the parts of a training so. Wrong by a quarter, now and then."""
    d = division
    # of each part what a rank has: layers that no plan names are whole on every tensor rank
    layers = 1 - sizes.cut / sizes.weights * (1 - 1 / d.layers)
    mine = layers / d.stages
    held = mine / d.shards
    optimizer = base.usage.peak.by_kind["optimizer"] * held / d.owners
    # the residual stream is whole on tensor ranks, which is about half of what a block keeps
    kept = batches.largest / base.batches.largest * (1 + 1 / d.layers) / 2 / d.sequence
    # 1F1B: the first stage keeps as many micro-batches as there are stages; it may have twice its part of them
    kept *= min(d.stages, batches.micro_batches) * min(1.0, 2 / d.stages)
    gathered = 2 * sizes.largest_unit * layers if d.shards > 1 else base.usage.peak.by_kind["gathered"] * mine
    by_kind = {
        "weights": round(sizes.weights * held),
        "gradients": round(sizes.trained * held),
        "optimizer": round(optimizer),
        "activations": round(base.usage.peak.by_kind["activations"] * kept),
        "gathered": round(gathered),
        "buffers": base.usage.peak.by_kind["buffers"],
    }
    seconds = {**base.usage.seconds}
    # all ranks together compute as much as before; of the optimizer each has its part
    seconds["optimizer"] = seconds.get("optimizer", 0.0) * held / d.owners
    peak = Peak(sum(by_kind.values()), by_kind, "not tried", [])
    sends = _collectives(d, batches, processes, per_machine, sizes, mine, by_kind["activations"])
    host = round(base.usage.host * kept)
    return replace(
        base.usage, peak=peak, host=host, seconds=seconds, collectives=[each for each in sends if each.ranks > 1]
    )


def _collectives(
    d: Division,
    batches: BatchSizes,
    processes: int,
    per_machine: int,
    sizes: NetworkSizes,
    mine: float,
    activations: int,
) -> list[Collective]:
    """What a rank sends in a step, by the kinds that matter."""
    inner = d.layers * d.sequence  # ranks that are neighbours
    # gradients are added up over all ranks that hold the same part, those of one sequence too
    copies = max(1, processes // (d.layers * d.stages * d.shards))
    trained, weights = round(sizes.trained * mine), round(sizes.weights * mine)
    is_far = inner * d.shards > per_machine
    return [
        # weights before each forward and each backward, gradients after it
        Collective("all-gather", d.shards, is_far, False, 2, 2 * batches.micro_batches * weights),
        Collective("reduce-scatter", d.shards, is_far, False, 1, trained),
        Collective("all-reduce", copies, inner * d.shards * copies > per_machine, False, 1, trained // d.shards),
        # layers that are divided add their results up, a pass after the other; keys and values are gathered
        Collective("all-reduce", d.layers, d.layers > per_machine, True, 64, activations // 4),
        Collective("all-gather", d.sequence, inner > per_machine, True, 32, activations // 8),
        # between stages: one tensor there and one back for each micro-batch
        Collective("send", d.stages, processes > per_machine, False, 2 * batches.micro_batches, activations // 32),
    ]
