"""What a strategy is: everything here holds for each of them, measured against one process.

A run goes to its end and saves on the way; another one goes on from there. Curve, figures and all that its checkpoint
holds, by name, are those of one process, and what has stopped goes on to the bit.
"""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.run import far, quickly
from tests.strategies.networks import (
    BatchNormNet,
    Contrast,
    DrawingNet,
    Next,
    Plain,
    Weighted,
)
from tests.strategies.runs import MUON, SGD, Train, alike, same_bits

# name → (processes, its words)
SPREAD = {
    "dp": (1, "strategy=dp"),
    "ddp on 1": (1, "strategy=ddp"),
    "ddp on 2": (2, "strategy=ddp"),
    "ddp on 4": (4, "strategy=ddp"),
    "tp on 2": (2, "strategy=tp"),
    "tp on 3": (3, "strategy=tp"),
    "ddp_tp on 4": (4, "strategy=ddp_tp strategy.tensor=2"),
    "zero1 on 1": (1, "strategy=zero1"),
    "zero1 on 3": (3, "strategy=zero1"),
    "fsdp on 1": (1, "strategy=fsdp"),
    "fsdp on 2": (2, "strategy=fsdp strategy.reshard_after_forward=false"),
    "fsdp on 3": (3, "strategy=fsdp strategy.sync_micro_batches=true"),
    "fsdp on 4": (4, "strategy=fsdp strategy.cpu_offload=true strategy.prefetch=2"),
    "hsdp on 4": (4, "strategy=hsdp"),
    "fsdp_tp on 4": (4, "strategy=fsdp_tp strategy.tensor=2"),
    "pp on 2": (2, "strategy=pp"),
    "pp on 3": (3, "strategy=pp strategy.schedule=GPipe"),
    "ddp_pp on 4": (4, "strategy=ddp_pp strategy.pipe=2"),
    "fsdp_pp on 4": (4, "strategy=fsdp_pp strategy.pipe=2"),
    "shard and tensor on 4": (4, "strategy=mesh strategy.shard=2 strategy.tensor=2"),
    "pipe and tensor on 4": (4, "strategy=mesh strategy.pipe=2 strategy.tensor=2"),
}
# each strategy once, on as few ranks as show it
ONCE = ["dp", "ddp on 2", "tp on 2", "zero1 on 3", "fsdp on 2", "pp on 2"]
PAIRS_OF_AXES = ["ddp_tp on 4", "hsdp on 4", "fsdp_tp on 4", "fsdp_pp on 4", "pipe and tensor on 4"]
AVERAGED = "ema.decay=0.9 ema.every=2"


def keeps_the_contract(train: Train, where: str, words: str = AVERAGED, **parts: Any) -> None:
    """To the end, and once more from a checkpoint in the middle of the second epoch."""
    ranks, own = SPREAD[where]
    reference = train(words, **parts)
    words = f"{words} {own} loop.micro_batches=2 loop.save_every=5"
    unbroken = train(words, ranks, **parts)
    alike(unbroken, reference)
    same_bits(train(f"{words} run.resume={unbroken.checkpoint(5)}", ranks, **parts), unbroken, start=5)


@pytest.mark.parametrize("where", quickly(SPREAD, *ONCE))
def test_every_strategy_has_the_curve_and_the_checkpoint_of_one_process(train: Train, where: str) -> None:
    keeps_the_contract(train, where, task=Weighted)


@pytest.mark.parametrize("where", quickly(PAIRS_OF_AXES, "ddp_tp on 4"))
def test_so_has_every_pair_of_axes(train: Train, where: str) -> None:
    ranks, words = SPREAD[where]
    seen = train(f"{AVERAGED} {words} loop.micro_batches=2 loop.save_every=5", ranks, task=Weighted)
    alike(seen, train(AVERAGED, task=Weighted))
    name = {"pipe and tensor on 4": "pp_tp"}.get(where, where.removesuffix(" on 4"))
    assert json.loads((seen.folder / "environment.json").read_text())["strategy"] == name


def test_a_moving_average_leaves_the_curve_as_it_is(train: Train) -> None:
    plain, averaged = train(task=Weighted), train(AVERAGED, task=Weighted)
    assert plain.each("loss_hex") == averaged.each("loss_hex")
    assert {name for name in averaged.tensors if not name.startswith("ema/")} == {*plain.tensors}


HALF = [("ddp on 2", "fp16"), ("tp on 2", "bf16"), ("zero1 on 3", "fp16"), ("fsdp on 3", "bf16")]


@pytest.mark.parametrize(("where", "precision"), quickly(HALF, HALF[0]))
def test_reduced_precision_trains_nearly_as_one_process_does(train: Train, where: str, precision: str) -> None:
    ranks, words = SPREAD[where]  # at each line copies have been compared, to the bit
    words = f"precision={precision} {words} loop.save_every=5"
    seen, alone = train(words, ranks), train(f"precision={precision}")
    assert far(seen.losses, alone.losses) < 0.02
    same_bits(train(f"{words} run.resume={seen.checkpoint(5)}", ranks), seen, start=5)  # the scale of fp16, too
    assert ("scaler/scale" in seen.tensors) == (precision == "fp16")
    assert seen.tensors.keys() == alone.tensors.keys()


def test_gathered_in_bf16_the_masters_stay_whole(train: Train) -> None:
    seen, alone = train("precision=fp32 strategy=fsdp strategy.param_dtype=bf16", 2), train("precision=fp32")
    assert 0 < far(seen.losses, alone.losses) < 0.05
    masters = seen.tensors["norm.weight"]
    assert masters.dtype == torch.float32
    assert not torch.equal(masters, masters.bfloat16().float())


# Each saves and each goes on with what another layout has saved, alone or in parts.
JOURNEYS = {
    "adamw, briefly": ["fsdp on 2", "zero1 on 3", "pp on 2", "single"],
    "adamw": ["dp", "ddp on 2", "tp on 2", "fsdp on 3", "zero1 on 3", "ddp_pp on 4", "fsdp_tp on 4", "hsdp on 4"],
    "sgd": ["single", "hsdp on 4", "pp on 2", "zero1 on 3", "fsdp_tp on 4", "ddp_tp on 4", "fsdp on 3", "pp on 3"],
}
JOURNEYS["adamw"] += ["pipe and tensor on 4", "single"]
JOURNEYS["sgd"] += ["tp on 3", "ddp on 4"]


@pytest.mark.parametrize("journey", quickly(JOURNEYS, "adamw, briefly"))
def test_a_run_goes_on_under_one_strategy_after_the_other(train: Train, journey: str) -> None:
    travels(train, [{"single": (1, ""), **SPREAD}[name] for name in JOURNEYS[journey]], SGD if journey == "sgd" else "")


def travels(train: Train, stations: list[tuple[int, str]], words: str = "", **parts: Any) -> None:
    """Two steps at each station."""
    reference = train(f"{words} {AVERAGED} loop.steps={2 * len(stations)}", **parts)
    resume = "run.resume=fresh"
    for start, (ranks, own) in zip(range(0, 2 * len(stations), 2), stations, strict=True):
        own = f"{own} {'loop.micro_batches=2' if 'pp' in own or 'pipe' in own else ''}"
        seen = train(f"{words} {AVERAGED} {own} loop.steps={start + 2} {resume}", ranks, **parts)
        assert far(seen.losses, reference.losses[start : start + 2]) < 1e-10, own
        resume = f"run.resume={seen.folder}"
    alike(seen, reference, start)


@pytest.mark.long
def test_experts_and_their_bias_go_on_under_one_strategy_after_the_other(train: Train) -> None:
    stations = [EXPERTS["fsdp, expert on 4"], (2, "strategy=tp"), EXPERTS["copies, expert on 2"]]
    stations += [SPREAD["zero1 on 3"], EXPERTS["fsdp, expert on 2"], (2, "strategy=cp"), (1, "")]
    travels(train, stations, model="experts biased", task=Next)


# ------------------------------------------------------------------------------------- networks that draw, and norms


@pytest.mark.parametrize("where", quickly(SPREAD, "tp on 2", "fsdp on 2"))
def test_networks_that_draw_have_one_curve_and_go_on_anywhere(train: Train, where: str) -> None:
    ranks, words = SPREAD[where]
    reference = train("loop.steps=6", model=DrawingNet)
    seen = train(f"loop.steps=6 {words} loop.micro_batches=2 loop.save_every=3", ranks, model=DrawingNet)
    alike(seen, reference)
    resumed = f"loop.steps=6 run.resume={seen.checkpoint(3)} loop.micro_batches=3"
    assert far(train(resumed, model=DrawingNet).losses, reference.losses[3:]) < 1e-10


class Normed(DrawingNet):
    def __init__(self) -> None:
        super().__init__(normed=True)


SYNCHRONISED: list[Any] = [(where, Normed) for where in ("ddp_tp on 4", "ddp_pp on 4", "hsdp on 4", "fsdp_tp on 4")]
SYNCHRONISED += [(where, Normed) for where in ("pp on 2", "fsdp on 3", "fsdp_pp on 4")]
SYNCHRONISED += [(where, BatchNormNet) for where in ("ddp on 2", "ddp on 4", "zero1 on 3")]


@pytest.mark.parametrize(("where", "network"), quickly(SYNCHRONISED, ("ddp on 2", BatchNormNet)))
def test_so_have_those_with_synchronised_batch_statistics(train: Train, where: str, network: Any) -> None:
    ranks, words = SPREAD[where]
    words = f"{words} strategy.sync_bn=true {'loop.micro_batches=2' if 'pp' in where else ''}"
    common = f"{SGD} loop.steps=6 {'loop.micro_batches=2' if 'pp' in where else ''}"
    seen, reference = train(f"{common} {words} loop.save_every=3", ranks, model=network), train(common, model=network)
    alike(seen, reference)
    alike(train(f"{common} run.resume={seen.checkpoint(3)}", model=network), reference, start=3)  # statistics, too


def test_without_it_running_statistics_are_averaged_before_use(train: Train) -> None:
    seen, alone = (
        train(f"{AVERAGED} {words}", ranks, model=BatchNormNet) for ranks, words in ((2, "strategy=ddp"), (1, ""))
    )
    assert 0 < far(seen.losses, alone.losses) < 0.1  # each rank's batch has a mean of its own
    for name in ("1.running_mean", "ema/1.running_mean"):
        # the mean of both halves is that of all, as far as the layer before it is the same
        torch.testing.assert_close(seen.tensors[name], alone.tensors[name], atol=0.05, rtol=0)


@pytest.mark.parametrize("ranks", quickly([2, 3], 3))
def test_a_loss_over_gathered_rows_is_the_loss_of_one_process(train: Train, ranks: int) -> None:
    alike(train("strategy=ddp", ranks, task=Contrast), train(task=Contrast))


class Recording(Plain):
    """Writes what a generator would give next, whenever a loss is computed in training, to a file of its rank."""

    def __init__(self, file: str) -> None:
        self.file = file

    def loss(self, output: Tensor, target: Any) -> Tensor:
        if output.requires_grad:
            rank = dist.get_rank() if dist.is_initialized() else 0
            with Path(f"{self.file}-{rank}").open("a") as file:
                file.write(f"{float(torch.rand(()))}\n")
        return super().loss(output, target)


@pytest.mark.long
def test_native_random_numbers_follow_from_seed_step_micro_batch_and_data_rank(train: Train, tmp_path: Path) -> None:
    def drawn(name: str, words: str, ranks: int) -> list[list[str]]:
        words = f"loop.dropout=native loop.steps=2 loop.micro_batches=2 +task.file={tmp_path / name} {words}"
        train(words, ranks, task=Recording)
        return [(tmp_path / f"{name}-{rank}").read_text().split()[-4:] for rank in range(ranks)]

    (alone,), (other,), two = drawn("alone", "", 1), drawn("other", "seed=4", 1), drawn("two", "strategy=ddp", 2)
    assert len({*alone, *other, *two[1]}) == 12
    assert two[0] == alone
    assert drawn("again", "strategy=ddp", 2) == two


# ---------------------------------------------------------------------------------------------------------- decoders

AXES = {
    "ddp on 3": (3, "strategy=ddp"),
    "zero1 on 2": (2, "strategy=zero1"),
    "fsdp on 3": (3, "strategy=fsdp"),
    "hsdp on 4": (4, "strategy=hsdp"),
    "tp on 2": (2, "strategy=tp"),
    "fsdp_tp on 4": (4, "strategy=fsdp_tp strategy.tensor=2"),
    "pp on 2": (2, "strategy=pp"),
    "fsdp_pp on 4": (4, "strategy=fsdp_pp strategy.pipe=2"),
    "pipe and tensor on 4": (4, "strategy=mesh strategy.pipe=2 strategy.tensor=2"),
    "cp on 2": (2, "strategy=cp"),
    "cp on 4": (4, "strategy=cp"),
    "ddp_cp on 4": (4, "strategy=ddp_cp strategy.context=2"),
    "fsdp_cp on 4": (4, "strategy=fsdp_cp strategy.context=2"),
    "context and tensor on 4": (4, "strategy=ddp_cp strategy.context=2 strategy.tensor=2"),
}
EXPERTS = {
    "fsdp, expert on 2": (2, "strategy=mesh strategy.shard=2 strategy.expert=2"),
    "copies, expert on 2": (2, "strategy=mesh strategy.replicate=2 strategy.expert=2"),
    "fsdp, expert on 4": (4, "strategy=fsdp strategy.expert=2"),
    "copies, expert on 4": (4, "strategy=mesh strategy.replicate=2 strategy.shard=2 strategy.expert=4"),
    "offloaded, expert on 2": (2, "strategy=fsdp strategy.expert=2 strategy.cpu_offload=true"),
    "context and expert on 4": (4, "strategy=fsdp strategy.context=2 strategy.expert=4"),
    "tensor and expert on 4": (4, "strategy=fsdp strategy.tensor=2 strategy.expert=2"),
}
MIXTURES = ("experts biased", "experts shared", "experts behind")  # in turn
FACTORS: list[list[str]] = [
    ["gpt", "llama", "experts"],
    [*AXES, *EXPERTS],
    ["", "packed"],  # documents, of which no token sees another one; their last tokens do not count
    ["", "window"],  # a token sees three tokens
    ["", "tied"],
    ["", "sequence", "loss_parallel", "dropout"],
    ["", "recomputing"],  # units and operators in turn
]


def possible(kind: str, where: str, _packed: str, window: str, tied: str, asked: str, _again: str) -> bool:
    """A tied weight is not split, and no two stages share it; only tensor ranks split tokens or a loss."""
    stages, splits, mixture = "pp" in where or "pipe" in where, "tp" in where or "tensor" in where, kind == "experts"
    return (
        (where in AXES or mixture)
        and not (tied and (stages or mixture or asked == "loss_parallel"))
        and not (window and mixture)
        and (splits or asked not in ("sequence", "loss_parallel"))
    )


def all_pairs(factors: list[list[str]]) -> list[tuple[str, ...]]:
    """In each step the possible case with most pairs of values that no case before it has, until all have been."""
    numbers: dict[Any, int] = {}
    cases = {
        case: sum(1 << numbers.setdefault(pair, len(numbers)) for pair in combinations(enumerate(case), 2))
        for case in product(*factors)
        if possible(*case)
    }
    left, chosen = (1 << len(numbers)) - 1, []
    while left:
        chosen.append(max(cases, key=lambda case: (cases[case] & left).bit_count()))
        left &= ~cases[chosen[-1]]
    return chosen


QUICK = [
    ("experts", "fsdp, expert on 2", "", "", "", "", ""),
    ("llama", "cp on 2", "packed", "", "tied", "dropout", "recomputing"),
    ("gpt", "tp on 2", "", "window", "tied", "sequence", "recomputing"),
]
OTHERS = [
    ("gpt", "cp on 2", "", "window", "", "", ""),
    ("llama", "tp on 2", "packed", "", "", "loss_parallel", ""),
    ("llama", "pp on 2", "packed", "window", "", "", ""),
]
DECODERS = {", ".join(filter(None, case)): case for case in [*QUICK, *OTHERS, *all_pairs(FACTORS)]}


@pytest.mark.parametrize("name", quickly(DECODERS, *(", ".join(filter(None, case)) for case in QUICK)))
def test_every_plan_of_a_decoder_keeps_the_contract(train: Train, name: str) -> None:
    kind, where, packed, window, tied, asked, again = DECODERS[name]
    number = [*DECODERS].index(name)
    kind = MIXTURES[number % 3] if kind == "experts" else kind
    alone = f"{kind} {window} {tied} {'dropout' if asked == 'dropout' else ''}"
    ranks, words = {**AXES, **EXPERTS}[where]
    if again:
        words += f" strategy.activation_checkpointing={('units', 'operators')[number % 2]}"
    common: dict[str, Any] = {"task": Next, "packed": bool(packed)}
    words = f"{AVERAGED} loop.steps=6 {words} loop.micro_batches=2"  # into the second epoch
    alike(
        train(words, ranks, model=f"{alone} {asked}", **common),
        train(f"{AVERAGED} loop.steps=6", model=alone, **common),
    )


# ------------------------------------------------------------------------------------------------------ whole matrices

# where an optimizer's matrices are whole, gathered, of one stage, of experts that ranks hold whole or in parts
MATRICES: dict[str, Any] = {
    "zero1 on 2": (2, "strategy=zero1", ""),
    "fsdp on 3": (3, "strategy=fsdp", ""),  # 4 rows and 24 over 3 ranks
    "fsdp, offloaded, on 2": (2, "strategy=fsdp strategy.cpu_offload=true", ""),
    "hsdp on 4": (4, "strategy=hsdp", ""),
    "tp on 2": (2, "strategy=tp", ""),
    "fsdp_tp on 4": (4, "strategy=fsdp_tp strategy.tensor=2", ""),
    "fsdp_pp on 4": (4, "strategy=fsdp_pp strategy.pipe=2 loop.micro_batches=2", ""),
    "gpt, fsdp_cp on 4": (4, "strategy=fsdp_cp strategy.context=2", "gpt tied"),
    "gpt, fsdp_tp on 4": (4, "strategy=fsdp_tp strategy.tensor=2", "gpt"),
    "experts, fsdp on 3": (3, "strategy=fsdp", "experts biased"),  # of 4 experts each rank has columns
    "experts, ddp_pp on 4": (4, "strategy=ddp_pp strategy.pipe=2 loop.micro_batches=2", "experts biased"),
    **{f"experts, {name}": (*EXPERTS[name], "experts biased") for name in ("fsdp, expert on 2", "copies, expert on 4")},
    "experts, tensor and expert on 4": (*EXPERTS["tensor and expert on 4"], "experts biased"),
}


@pytest.mark.long
@pytest.mark.parametrize("where", MATRICES)
def test_whole_matrices_have_one_curve_and_resume_to_the_bit(train: Train, where: str) -> None:
    ranks, own, kind = MATRICES[where]
    parts: dict[str, Any] = {"model": kind, "task": Next} if kind else {}
    words = f"{MUON} loop.steps=6 {own} loop.save_every=3"
    unbroken, reference = train(words, ranks, **parts), train(f"{MUON} loop.steps=6", **parts)
    alike(unbroken, reference)
    same_bits(train(f"{words} run.resume={unbroken.checkpoint(3)}", ranks, **parts), unbroken, start=3)
    # one process goes on from its checkpoint, and it from that one's
    resumed = train(f"{MUON} loop.steps=5 run.resume={unbroken.checkpoint(3)}", **parts)
    alike(train(f"{words} run.resume={resumed.folder}", ranks, **parts), reference, start=5)


# ---------------------------------------------------------------------------------------------------------------- GPUs

# these processes share one GPU; gloo sends no GPU's tensors from rank to rank, and gathers none as DTensor does
ON_GPUS = [pytest.param(name, "gloo", marks=pytest.mark.gpu) for name in ("ddp on 2", "fsdp on 2", "zero1 on 3")]
ON_GPUS += [pytest.param(name, "nccl", marks=pytest.mark.gpu(ranks)) for name, (ranks, _) in SPREAD.items()]


@pytest.mark.parametrize(("where", "backend"), ON_GPUS)
def test_on_gpus_the_curve_is_that_of_one_process_on_a_cpu(train: Train, where: str, backend: str) -> None:
    ranks, words = SPREAD[where]
    words = f"{AVERAGED} {words} device=cuda distributed.backend={backend} loop.micro_batches=2"
    alike(train(words, ranks, task=Weighted), train(AVERAGED, task=Weighted))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["", SGD])
def test_on_a_gpu_offloaded_parameters_learn_in_fp16(train: Train, optimizer: str) -> None:
    words = f"{optimizer} strategy=fsdp strategy.cpu_offload=true precision=fp16 device=cuda"
    # gradients on the host, the loss's scale on the GPU
    assert train(words).losses[-1] == pytest.approx(train(optimizer).losses[-1], abs=0.1)
