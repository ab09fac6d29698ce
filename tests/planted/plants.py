"""The list: what is typed, where `job=verify` must find it, and what it says of the cause."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LAB = ["--config-dir", str(Path(__file__).parent / "conf"), "trust=[tests]", "loader.workers=0"]
NET = [*LAB, "model=net", "data=numbers", "task=classes", "loop.global_batch=24"]
GPT = [*LAB, "model=gpt_nano", "model.width=32", "model.depth=2", "data=synthetic_tokens", "data.length=16"]
GPT += ["data.size=64", "data.evaluation_size=16", "task=language", "loop.global_batch=8"]
ROWS = ["model._target_=tests.planted.networks.OfRows", "task._target_=tests.planted.users.OfDicts"]
GRAPHS = ["model._target_=tests.planted.networks.OfNodes", "data._target_=tests.planted.users.Graphs"]
MICRO = "loop.micro_batches=2"
SEEN = "differs when other processes are in sight"
RIGHT = "Network, task and data are right on one process"


class Plant(NamedTuple):
    """A mistake; `own` are the words of the run alone, all others are the reference's, too."""

    found: str  # the verdict is DIFFERS, and this
    cause: str  # a part of what it says of the cause
    words: list[str]
    own: list[str]


def layer(kind: str, cause: str, found: str = "at step 1, forward, middle,", *own: str, words: str = "") -> Plant:
    """A layer of the network that is wrong."""
    return Plant(found, cause, [*NET, f"model.kind={kind}", *words.split()], ["strategy=ddp", *own])


def user(group: str, name: str, found: str, cause: str, *words: str) -> Plant:
    """A class of a user that is wrong."""
    class_word = f"{group}._target_=tests.planted.users.{name}"
    return Plant(f"at step {found}", cause, [*NET, class_word, *words], ["strategy=ddp"])


def program(word: str, found: str, cause: str, words: list[str] = NET, *own: str) -> Plant:
    """A strategy that is wrong: zero1.summed."""
    option, _, name = word.partition(".")
    chosen = [f"strategy={option}", f"strategy._target_=tests.planted.strategies.{name}"]
    return Plant(found, cause, words, [*chosen, *own])


PLANTS = {
    # networks
    "own_rank": layer("own_rank", SEEN, "at step 1, forward, middle, samples of rank 1,", MICRO),
    "own_seed": layer("own_seed", "no seed reaches", "at initial values, middle.weight,"),
    "python_random": layer("python_random", "the forward draws from Python's random"),
    "native": layer("drop", "random numbers: torch's own", words="loop.dropout=native"),
    "centred": layer("centred", "depends on the other samples"),
    "batch_norm": layer("batch_norm", "strategy.sync_bn=true: over all ranks"),
    "own_buffer": layer("own_buffer", "a buffer that is updated from", "at step 1, update, middle.mean"),
    "unsaved": layer("unsaved", "the resume: something that the forward reads", "at step 2, forward, middle,"),
    "adapted": layer("adapted", "an evaluation before this step"),
    # data, tasks, schedules, optimizers
    "same_order": user("data", "SameOrder", "3, data, inputs, rank 1", SEEN),
    "drawn": user("data", "Drawn", "1, data, inputs", "a generator of its own"),
    "padded": user("data", "Padded", "1, forward, ", "collate pads", "model._target_=tests.planted.networks.OfPadded"),
    "summed_loss": user("task", "Summed", "1, loss, loss", "It is 1/2 times that of one process"),
    "class_weights": user("task", "ClassWeights", "1, loss, loss", "the mean over the Task.weight units"),
    "meaned": user("task", "Meaned", "3, evaluation, accuracy", "no sum over samples"),
    "counts": user("task", "Counts", "2, loss, loss", "something that Task keeps"),
    "hearing": user("schedule", "Hearing", "2, learning rate, ", "something that Schedule keeps", "schedule=constant"),
    "scaled_rate": user("optimizer", "ScaledRate", "1, optimizer step, head.bias", SEEN, "optimizer=sgd"),
    # strategies
    "own_values": program(
        "ddp.own_values",
        "at initial values, embed.weight, rank 1",
        "the values that it gives to ranks",
        [*NET, "model.kind=masked"],
    ),
    "stale_keys": program(
        "ddp.stale_keys",
        "at step 2, forward, middle",
        "the random numbers that it gives to a sample",
        [*NET, "model.kind=drop"],
    ),
    "swapped_targets": program(
        "fsdp.swapped_targets",
        "at step 1, loss",
        "without micro-batches it is right",
        [*NET, *ROWS, "data._target_=tests.planted.users.Listed"],
        MICRO,
    ),
    "never_synced": program(
        "ddp.never_synced",
        "at step 1, gradient",
        "how it adds up the gradients",
        [*NET, "model.kind=batch_norm"],
        "strategy.sync_bn=true",
    ),
    "summed": program("zero1.summed", "at step 1, gradient", "it is 2 times what it should be, as a sum is to a mean"),
    "zeros_for_unused": program(
        "zero1.zeros_for_unused",
        "at step 1, gradient, middle.spare.",
        "what no sample has used",
        [*NET, "model.kind=spare"],
    ),
    "narrow": program(
        "ddp.narrow",
        "in its precision alone: narrow on 2, fp64 gap ",
        "in fp64 the strategy trains the same",
        [*NET, "precision=fp32"],
    ),
    "stages_norm": program(
        "pp.stages_norm",
        "at step 1, norm",
        "the norm that it takes of the same gradients",
        [*GPT, "loop.max_norm=0.1"],
        MICRO,
    ),
    "unclipped": program(
        "fsdp.unclipped",
        "at step 1, clipped gradient",
        "what it does to the same gradients before the step",
        [*NET, "loop.max_norm=0.1"],
    ),
    "drifting": program("ddp.drifting", "at step 1, update, head.weight", "what follows the optimizer's step"),
    "counted_padding": program(
        "ddp.counted_padding",
        "at step 3, evaluation",
        "which samples count",
        [*NET, "data._target_=tests.planted.users.Odd", "loop.eval_batch=24"],
    ),
    "lost_moment": program("fsdp.lost_moment", "at step 1, resume, optimizer/", "the checkpoint does not give back"),
}
