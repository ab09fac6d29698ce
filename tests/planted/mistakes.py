"""Mistakes of users: networks, tasks, data, schedules and optimizers that are wrong under `ddp`."""

from __future__ import annotations

from dataclasses import replace

from tests.planted.plant import NET, Plant

RANDOM = ("the network", "random numbers")
SEEN = "differs when other processes are in sight"
FIRST = "at step 1, forward, middle,"
LISTS = ("model=of_rows", "task=of_dicts")


WHY = {
    "own_rank": SEEN,
    "own_rank_in_turn": SEEN,
    "own_eps": SEEN,
    "python_random": "the forward draws from Python's random",
    "numpy_random": "the forward draws from NumPy's",
    "own_generator": "draws from middle.generator, a generator of its own",
    "drawn": "a generator of its own",
    "padded": "collate pads",
    "class_weights": "the mean over the Task.weight units",
    "negatives": "trainer.gather",
    "centred": "depends on the other samples",
    "centred_in_turn": "depends on the other samples",
    "chosen": "chooses",
    "batch_norm": "strategy.sync_bn=true",
    "native_drop": "random numbers: torch's own",
    "drawn_in_turn": "as often as there are samples",
    "own_buffer": "a buffer that is updated from",
    "own_field": "a forward before the first step",
    "mixed": "depends on the other samples",
    "mixed_by_task": "depends on the other samples",
    "own_backward": "a backward of its own",
    "own_hook": SEEN,
    "own_seed": "no seed reaches",
    "unsaved": "the resume",
    "counts": "something that Task keeps",
    "remembering": "something that Schedule",
    "recalling": "something that Data",
    "same_order": SEEN,
    "counted": "repeated in the same process",
    "scaled": "an item depends on the other",
    "summed": "It is 1/2 times that of one process",
    "meaned": "no sum over samples",
    "own_meter": "no sum over samples",
    "own_decay": "after_step",
    "low_rank": "after_step",
    "calls": "counts its calls",
    "adapted": "an evaluation before",
    "hearing": "something that Schedule",
    "places": "after_step",
    "late_metric": SEEN,
}


def of_network(
    what: str, where: str, *words: str, own: tuple[str, ...] = (), true: tuple[str, ...] = ("the network",)
) -> Plant:
    """A network that is wrong in its forward."""
    return Plant(what, (*NET, *words), ("strategy=ddp", *own), (FIRST + where,), true)


def of(what: str, word: str, where: str, *true: str) -> Plant:
    """What one word chooses is wrong."""
    return Plant(what, (*NET, *word.split()), ("strategy=ddp",), (f"at {where}",), true)


def _network(kind: str) -> str:
    return f"+model.kind={kind}"


_PLANTS = {
    "own_rank": of_network("a layer asks for its rank", " samples of rank 1,", _network("own_rank")),
    "own_rank_in_turn": of_network(
        "the same, with micro-batches", " samples of rank 1,", _network("own_rank"), own=("loop.micro_batches=2",)
    ),
    "own_eps": of_network("a norm with another epsilon on one rank", " samples of rank 1,", _network("own_eps")),
    "python_random": of_network(
        "a layer draws a number for each sample from Python's generator", "", _network("python_random"), true=RANDOM
    ),
    "numpy_random": of_network("the same, from NumPy's", "", _network("numpy_random"), true=RANDOM),
    "own_generator": of_network(
        "the same, from a generator that it keeps", "", _network("own_generator"), true=RANDOM[1:]
    ),
    "centred": of_network("a layer subtracts the mean of its batch", "", _network("centred")),
    "centred_in_turn": of_network(
        "the same, with micro-batches", "", _network("centred"), own=("loop.micro_batches=2",)
    ),
    "chosen": of_network("a layer chooses by its batch what it computes", "", _network("chosen")),
    "batch_norm": of_network("BatchNorm without strategy.sync_bn", "", _network("batch_norm")),
    "drawn_in_turn": of_network(
        "a layer draws for one sample after the other", "", _network("drawn_in_turn"), true=RANDOM
    ),
    "native_drop": of_network(
        "dropout with torch's own numbers, that is no module",
        "",
        _network("native_drop"),
        "loop.dropout=native",
        true=RANDOM,
    ),
    "own_buffer": of(
        "each rank keeps a mean of its own samples",
        _network("own_buffer"),
        "step 1, update, middle.mean",
        "the network",
    ),
    "own_field": of(
        "the same in a field that is no buffer, in which a trial forward leaves something, too",
        _network("own_field"),
        "step 1, forward, middle",
        "a forward before the first step",
    ),
    "mixed": of_network(
        "a layer mixes each sample with another one of its micro-batch, drawn by torch.randperm",
        "",
        _network("mixed"),
        true=("the network",),
    ),
    "mixed_by_task": of(
        "a task does the same before the network sees it",
        "task=mixed_by_task",
        "step 1, forward, embed",
        "the network: what this module, or Task.forward before it,",
    ),
    "own_backward": of(
        "a backward that is not linear in the samples",
        _network("own_backward"),
        "step 1, gradient, middle.bias,",
        "the network",
    ),
    "own_hook": of(
        "a hook changes a gradient on one rank",
        _network("own_hook"),
        "step 1, gradient, middle.weight,",
        "the network",
    ),
    "own_seed": of(
        "first weights that no seed reaches",
        _network("own_seed"),
        "initial values, middle.weight,",
        "the network",
        "random numbers",
    ),
    "unsaved": of(
        "a layer counts its calls, and no checkpoint keeps it",
        _network("unsaved"),
        "step 2, forward, middle,",
        "the resume",
        "the network",
    ),
    "counts": of(
        "a task counts steps, and no checkpoint keeps it", "task=counts", "step 2, loss, loss", "the resume", "the task"
    ),
    "remembering": of(
        "a schedule counts how often it is asked, and no checkpoint keeps it",
        "schedule=remembering",
        "step 2, learning rate, ",
        "the resume",
        "the schedule",
    ),
    "recalling": of(
        "data that counts its batches, and no checkpoint keeps it",
        "data=recalling",
        "step 2, data, inputs",
        "the resume",
        "the data",
    ),
    "same_order": of(
        "an order of the data that is another one on one rank from the second epoch on",
        "data=same_order",
        "step 3, data, inputs, rank 1",
        "the data",
    ),
    "counted": of("an item depends on what was read before", "data=counted", "step 1, data, inputs", "the data"),
    "scaled": of("a batch is divided by its largest number", "data=scaled", "step 1, data, inputs", "the data"),
    "read": of(
        "an item depends on its place in its batch",
        " ".join((*LISTS, "data=read")),
        "step 1, data, inputs.*",
        "the data",
    ),
    "drawn": of(
        "an item has noise from a generator of the data set's own", "data=drawn", "step 1, data, inputs", "the data"
    ),
    "padded": of(
        "a batch is padded to its longest sample, and a mean counts the padding",
        "data=padded model=of_padded",
        "step 1, forward, ",
        "the data",
    ),
    "class_weights": of(
        "a loss with class weights, and Task.weight counts samples",
        "task=class_weights",
        "step 1, loss, loss",
        "the task",
    ),
    "negatives": of(
        "a loss of each sample against the others of its rank, without trainer.gather",
        "task=negatives",
        "step 1, loss, loss",
        "the task",
    ),
    "summed": of("a loss that is a sum, divided by the global batch", "task=summed", "step 1, loss, loss", "the task"),
    "meaned": of(
        "a metric that is a mean", "task=meaned", "step 3, evaluation, accuracy", "the task", "the evaluation"
    ),
    "own_meter": of(
        "a task adds up its metric in its own fields",
        "task=own_meter",
        "step 3, evaluation, accuracy",
        "the evaluation",
    ),
    "own_decay": of(
        "Task.after_step changes a weight on one rank", "task=own_decay", "step 1, update, middle.weight", "the task"
    ),
    "low_rank": of(
        "the same, of a weight whose first gradient is 0",
        f"{_network('low_rank')} task=last_decay +task.name=middle.down.weight",
        "step 3, update, middle.down.weight",
        "the task",
    ),
    "places": of(
        "the same, beside a buffer of large numbers",
        f"{_network('places')} task=last_decay",
        "step 3, update, middle.weight",
        "the task",
    ),
    "late_metric": of(
        "a metric that is wrong from the third batch on",
        "task=late_metric loop.eval_batch=24",
        "step 3, evaluation, accuracy",
        "the task",
        "the evaluation",
    ),
    "calls": of_network(
        "a layer counts its calls, of which a step has as many as micro-batches",
        "",
        _network("calls"),
        own=("loop.micro_batches=2",),
    ),
    "adapted": of(
        "a layer counts the samples of evaluations",
        _network("adapted"),
        "step 1, forward, middle",
        "the network",
        "an evaluation before",
    ),
    "hearing": of(
        "a schedule counts evaluations, and no checkpoint keeps it",
        "schedule=hearing",
        "step 2, learning rate, ",
        "the resume",
        "the schedule",
    ),
    "by_shard": Plant(
        "an optimizer takes the norm of its shard for that of the gradient",
        (*NET, "optimizer=by_shard"),
        ("strategy=fsdp",),
        ("at step 1, optimizer step, ",),
        ("the optimizer", "the strategy, or the optimizer"),
    ),
    "scaled_rate": of(
        "an optimizer multiplies its rate by the number of processes",
        "optimizer=scaled_rate",
        "step 1, optimizer step, head.bias",
        "the optimizer",
    ),
}
PLANTS = {name: replace(plant, why=WHY.get(name, "")) for name, plant in _PLANTS.items()}
