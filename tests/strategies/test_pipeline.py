"""Pipelines: every schedule is exact, whatever flows through; what cannot flow is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies import toys
from trainer import Plan, Task
from trainer.data.loader import Batch
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.compile import CompileSettings
from trainer.parallel.pipeline.schedule import SCHEDULES, StageLayout, can_run, runs_over_gloo
from trainer.strategies.machine import Machine
from trainer.strategies.pp import PP
from trainer.strategies.single import Single


class Layers(nn.Module):
    """A shape, a mask, a buffer, and values that are handed on and not in order in memory."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.place = nn.Parameter(torch.linspace(-1, 1, 16))
        self.last = nn.Linear(16, 4)
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 2, 16))

    def forward(self, inputs: Any) -> Tensor:
        x = inputs["x"]
        early = F.gelu(self.first(x)).t().contiguous().t() * self.scale + self.place  # (B, 16), not in order in memory
        batch = early.shape[0]
        y = (self.dropout(self.second(early)) * (x[:, :1] > -1)).t().contiguous().t()
        y = F.gelu(self.third(y))
        return self.last(y.view(batch, -1) * self.scale)

    def plan(self) -> Plan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return Plan(tensor={"second": ColwiseParallel(), "third": RowwiseParallel()}, cuts=("third",))


class Recalling(nn.Module):
    """It uses what is handed on once more, in a way that no gradient can come back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Any) -> Tensor:
        early = self.first(inputs["x"])
        return self.last(self.middle(early) * early.detach())

    def plan(self) -> Plan:
        return Plan(cuts=("middle",))


class Images(nn.Module):
    """An image network that is given more than images."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any) -> Tensor:
        return self.network(inputs["image"])


class Blocks(toys.Blocks):
    """Blocks that are given a mask."""

    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs["x"])


class Guided(Blocks):
    """Something learned goes to every block, beside what goes from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.guide = nn.Parameter(torch.linspace(0, 0.1, 12))

    def through(self, hidden: Tensor, x: Tensor) -> Tensor:
        mask = torch.softmax(x[:, :, None] * self.guide, -1)  # (B, 12, 12)
        for block in self.blocks:
            hidden, _ = block(hidden, mask=mask)
        return hidden


class Drawing(Blocks):
    """It draws by itself, outside of its blocks: a dropout before each of them, and which of them count half."""

    def through(self, hidden: Tensor, x: Tensor) -> Tensor:
        mask = hidden.new_ones(12, 12).tril().expand(len(x), -1, -1) / len(hidden[0])
        for block in self.blocks:
            hidden = F.dropout(hidden, 0.3, self.training)
            halved = self.training and torch.rand([]) < 0.3
            hidden, mask = block(hidden, mask=mask)
            hidden = 0.5 * hidden if halved else hidden
        return hidden + 0.1 * torch.rand_like(hidden)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "layers": Layers,
    "dropout": lambda: Layers(0.4),
    "recalling": Recalling,
    "resnet": lambda: Images(resnet18(4, 3, 8)),
    "blocks": Blocks,
    "guided": Guided,
    "blocks, drawing": Drawing,
    "blocks, dropout": lambda: Blocks(dropout=0.4),
    "vit": lambda: Images(VisionTransformer(4, 3, 8, patch_size=4, width=24, heads=4)),
}


class Weighted(Task):
    """Samples that do not count, a loss of two parts, and a table of results."""

    def loss(self, output: Any, target: Any) -> Any:
        each = F.cross_entropy(output, target[0], reduction="none") * target[1]
        mean = each.sum() / target[1].sum().clamp(min=1)
        decay = (output.square().mean(1) * target[1]).sum() / target[1].sum().clamp(min=1)
        return {"entropy": mean, "decay": 0.1 * decay}

    def weight(self, target: Any) -> Tensor:
        return target[1].sum()

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        cells = target[0] * 4 + output.argmax(-1)
        return {"confusion": torch.bincount(cells, minlength=16), "norm": output.square().sum()}


@dataclass(frozen=True)
class Run:
    """A few steps of a network under pp with these fields, or under single where there are none."""

    fields: dict[str, Any] | None = None
    network: str = "layers"
    micro_batches: int = 4
    samples: int = 24  # of a global batch
    precision: str = "fp64"
    steps: int = 3

    def alone(self) -> Run:
        return replace(self, fields=None)


def learn(launch: Launch, run: Run) -> dict[str, Any]:
    """Train, and evaluate batches of which one rank has few samples that count, or none."""
    machine = Machine(launch=launch, device="cpu", precision=run.precision, seed=7)
    strategy: Any = Single(machine=machine) if run.fields is None else PP(machine=machine, **run.fields)
    torch.manual_seed(5)
    make, task = NETWORKS[run.network], Weighted()
    network = toys.built(strategy, make)
    strategy.data_ranks(launch.world_size)
    strategy.refuse_shares(launch.world_size, 48, run.micro_batches, False)
    strategy.check(task, network, launch.world_size)
    seen: dict[str, Any] = {"sums": [], "norms": [], "evaluations": []}
    with strategy:
        inputs, targets = samples(0, 2)
        parallel_model = strategy.build(task, network, (inputs, targets))
        if run.fields is not None:  # what others hold is let go
            assert all(p.is_meta for p in network.parameters() if id(p) not in held(parallel_model.network))
        optimizer = parallel_model.optimizer(
            lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9), groups_of(parallel_model)
        )
        for step in range(run.steps):
            sums = parallel_model.forward_backward(share(strategy, run, step), step)
            seen["norms"].append(float(parallel_model.optimizer_step(optimizer, 1.0)))
            seen["sums"].append({name: float(value) for name, value in strategy.totals(sums).read().items()})
        parallel_model.settle()
        for size in (7, 4, 1):
            rank, ranks = strategy.data_group.rank, strategy.data_group.size
            own = list(range(size))[rank::ranks]
            indices = torch.tensor(own or [0])
            inputs, targets = samples(1000, size)
            batch = Batch(taken(inputs, indices), taken(targets, indices), indices, range(size), size)
            with torch.no_grad():
                totals = strategy.totals(parallel_model.evaluate(batch, len(own))).read()
            seen["evaluations"].append({name: value.double().flatten().tolist() for name, value in totals.items()})
        seen["weights"] = {name: toys.gathered(value) for name, value in parallel_model.network.state_dict().items()}
        seen["memories"] = sorted(parallel_model.state(optimizer))
    return seen


def samples(seed: int, size: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 12, generator=generator)
    image = torch.randn(size, 3, 8, 8, generator=generator)
    counts = torch.rand(size, generator=generator) < 0.7
    inputs = {"x": x, "image": image, "names": [f"sample {index}" for index in range(size)]}
    return inputs, ((x.sum(1) > 0).long() + 2 * (image.mean((1, 2, 3)) > 0), counts)


def taken(tree: Any, indices: Tensor) -> Any:
    """Samples of a tree by their indices."""
    if isinstance(tree, Tensor):
        return tree[indices]
    if isinstance(tree, dict):
        return {key: taken(value, indices) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(taken(value, indices) for value in tree)
    return [tree[index] for index in indices.tolist()]


def share(strategy: Any, run: Run, step: int) -> list[Batch]:
    """This rank's micro-batches of one step's global batch."""
    inputs, targets = samples(step + 1, run.samples)
    size = run.samples // run.micro_batches
    batches = []
    for start in range(0, run.samples, size):
        part = range(start, min(start + size, run.samples))
        at = torch.tensor(list(part)[strategy.data_group.rank :: strategy.data_group.size])
        batches.append(Batch(taken(inputs, at), taken(targets, at), at, part, run.samples))
    return batches


def groups_of(parallel_model: Any) -> list[dict[str, Any]]:
    return [{"params": [p for p in parallel_model.network.parameters() if p.requires_grad]}]


def held(network: nn.Module) -> set[int]:
    return {id(parameter) for parameter in network.parameters()}


_done: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture
def train(processes: Processes) -> Any:
    """Run on so many ranks; what ran before is remembered."""

    def remembered(size: int, run: Run) -> list[dict[str, Any]]:
        skip_what_is_refused(run.fields or {})
        if (key := f"{size} {run}") not in _done:
            _done[key] = processes.run(size, learn, run)
        return _done[key]

    return remembered


def skip_what_is_refused(fields: dict[str, Any]) -> None:
    if not runs_over_gloo(fields.get("schedule", "1F1B")):
        pytest.skip("this torch's gloo cannot run it, so it is refused")


def same(ranks: list[dict[str, Any]], alone: dict[str, Any], within: float = 1e-10) -> None:
    """Every rank has seen what one process sees, and together they hold what it holds."""
    weights: dict[str, Any] = {}
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], abs=within)
        for kind in ("sums", "evaluations"):
            for own, other in zip(rank[kind], alone[kind], strict=True):
                assert own.keys() == other.keys()
                for name, value in own.items():
                    assert value == pytest.approx(other[name], abs=max(within, 1e-9)), (kind, name)
        weights |= rank["weights"]
    assert weights.keys() == alone["weights"].keys()
    for name, value in weights.items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(alone["weights"][name]), rtol=0, atol=within)
    assert {name for rank in ranks for name in rank["memories"]} == set(alone["memories"])


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    quickly(
        [(s, m) for s in SCHEDULES for m in (1, 4) if can_run(s, StageLayout(2, 2), m)],
        *[(s, 4) for s in SCHEDULES if can_run(s, StageLayout(2, 2), 4)],
    ),
)
def test_every_schedule_computes_what_one_process_does(train: Any, schedule: str, micro_batches: int) -> None:
    run = Run({"schedule": schedule}, micro_batches=micro_batches)
    same(train(2, run), train(1, run.alone())[0])


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    quickly([("1F1B", 1), ("1F1B", 2), ("1F1B", 4), ("GPipe", 2)], ("1F1B", 2), ("GPipe", 2)),
)
def test_fewer_micro_batches_than_stages_are_run_one_after_the_other(
    train: Any, schedule: str, micro_batches: int
) -> None:
    run = Run({"schedule": schedule}, micro_batches=micro_batches)
    same(train(4, run), train(1, run.alone())[0])


@pytest.mark.parametrize(
    ("axis", "schedule"),
    quickly(
        [(a, s) for a in ("shard", "replicate", "tensor") for s in ("1F1B", "ZBVZeroBubble")],
        ("replicate", "1F1B"),
    ),
)
def test_the_other_axes_of_the_mesh_change_nothing(train: Any, axis: str, schedule: str) -> None:
    run = Run({"pipe": 2, axis: 2, "schedule": schedule})
    same(train(4, run), train(1, run.alone())[0])


@pytest.mark.parametrize("fields", [{}, pytest.param({"schedule": "LoopedBFS"}, marks=pytest.mark.long)])
def test_parameters_may_be_gathered_in_every_micro_batch(train: Any, fields: dict[str, Any]) -> None:
    run = Run({**fields, "pipe": 2, "shard": 2, "reshard_after_forward": True})
    same(train(4, run), train(1, run.alone())[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "fields"), [(2, {}), (4, {}), (2, {"schedule": "Interleaved1F1B"}), (4, {"pipe": 2, "shard": 2})]
)
def test_a_vision_transformer_is_the_same_in_any_number_of_stages(
    train: Any, size: int, fields: dict[str, Any]
) -> None:
    run = Run(fields, network="vit")
    same(train(size, run), train(1, run.alone())[0])


FOUR = {"pipe": 2, "replicate": 2, "schedule": "Interleaved1F1B", "activation_checkpointing": "units"}


@pytest.mark.parametrize(
    ("size", "fields", "network"),
    [
        (2, {}, "blocks"),
        pytest.param(4, FOUR, "guided", marks=pytest.mark.long),
        pytest.param(4, {"pipe": 2, "shard": 2, "reshard_after_forward": True}, "blocks", marks=pytest.mark.long),
        pytest.param(4, FOUR, "blocks", marks=pytest.mark.long),
        pytest.param(4, {"pipe": 2, "tensor": 2, "schedule": "ZBVZeroBubble"}, "blocks", marks=pytest.mark.long),
        pytest.param(4, {"pipe": 2, "shard": 2}, "guided", marks=pytest.mark.long),
    ],
)
def test_a_network_of_blocks_is_cut_between_them(train: Any, size: int, fields: dict[str, Any], network: str) -> None:
    run = Run(fields, network=network)
    same(train(size, run), train(1, run.alone())[0])


@pytest.mark.long
def test_a_convolutional_network_keeps_its_statistics_by_micro_batch(train: Any) -> None:
    run = Run({"schedule": "ZBVZeroBubble"}, network="resnet", micro_batches=2, steps=2)
    same(train(2, run), train(1, run.alone())[0], within=1e-8)  # ReLU's kinks and small batches enlarge rounding


@pytest.mark.long
def test_synchronised_statistics_are_those_of_the_whole_micro_batch(train: Any) -> None:
    run = Run({"pipe": 2, "replicate": 2, "sync_bn": True}, network="resnet", micro_batches=2, steps=2)
    same(train(4, run), train(1, run.alone())[0], within=1e-8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "mode"),
    [("1F1B", "operators"), ("LoopedBFS", "units"), ("ZBVZeroBubble", "units"), ("DualPipeV", "units")],
)
def test_recomputing_changes_nothing(train: Any, schedule: str, mode: str) -> None:
    run = Run({"schedule": schedule, "activation_checkpointing": mode}, network="vit")
    same(train(2, run), train(1, run.alone())[0])


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 2])
def test_what_a_forward_draws_outside_of_its_blocks_is_that_of_one_process(train: Any, stages: int) -> None:
    schedule = "Interleaved1F1B" if stages > 1 else "1F1B"
    run = Run({"schedule": schedule, "stages_per_rank": stages}, network="blocks, drawing")
    same(train(2, run), train(1, run.alone())[0])


@pytest.mark.parametrize(
    ("fields", "network"),
    [
        pytest.param({}, "dropout", marks=pytest.mark.long),
        ({"schedule": "ZBVZeroBubble"}, "dropout"),
        pytest.param(
            {"schedule": "Interleaved1F1B", "activation_checkpointing": "units"}, "dropout", marks=pytest.mark.long
        ),
        pytest.param({"activation_checkpointing": "units"}, "blocks, dropout", marks=pytest.mark.long),
    ],
)
def test_dropout_follows_from_numbers(processes: Processes, fields: dict[str, Any], network: str) -> None:
    skip_what_is_refused(fields)
    run = Run(fields, network=network, precision="fp32")
    once, again = processes.run(2, learn, run), processes.run(2, learn, run)
    for one, other in zip(once, again, strict=True):
        assert {name: value.tobytes() for name, value in one.pop("weights").items()} == {
            name: value.tobytes() for name, value in other.pop("weights").items()
        }
        assert one == other
    plain = Run({**fields, "activation_checkpointing": "none"}, network=network, precision="fp32")
    assert [rank["sums"] for rank in processes.run(2, learn, plain)] == [rank["sums"] for rank in once]


@pytest.mark.parametrize(
    ("fields", "precision", "network"),
    [
        pytest.param({}, "bf16", "layers", marks=pytest.mark.long),
        ({}, "fp16", "layers"),
        pytest.param({"pipe": 2, "shard": 2}, "bf16", "layers", marks=pytest.mark.long),
        pytest.param({"pipe": 2, "shard": 2, "param_dtype": "bf16"}, "fp32", "layers", marks=pytest.mark.long),
        pytest.param({}, "bf16", "blocks", marks=pytest.mark.long),
        pytest.param({"pipe": 2, "shard": 2, "param_dtype": "bf16"}, "fp32", "blocks", marks=pytest.mark.long),
    ],
)
def test_half_precision_travels_between_stages(
    train: Any, fields: dict[str, Any], precision: str, network: str
) -> None:
    run = Run(fields, network=network, precision=precision)
    (alone,), ranks = train(1, run.alone()), train(4 if "shard" in fields else 2, run)
    for rank in ranks:
        assert [s["loss"] for s in rank["sums"]] == pytest.approx([s["loss"] for s in alone["sums"]], abs=5e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "fields"),
    quickly(
        [
            (2, {}),
            (2, {"schedule": "ZBVZeroBubble"}),
            (4, {"pipe": 2, "replicate": 2, "schedule": "Interleaved1F1B"}),
            (4, {"pipe": 2, "shard": 2}),
            (4, {"pipe": 2, "tensor": 2}),
        ],
        (2, {"schedule": "ZBVZeroBubble"}),
    ),
)
def test_checkpoints_are_those_of_one_process(
    processes: Processes, size: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    skip_what_is_refused(fields)
    case = toys.Case("pp", fields, micro_batches=4, steps=14)
    unbroken = processes.run(size, toys.run, case)
    processes.run(size, toys.run, case.but(folder=str(tmp_path / "pp"), save=6, steps=6))
    for rank, whole in zip(
        processes.run(size, toys.run, case.but(folder=str(tmp_path / "pp"), start=6)), unbroken, strict=True
    ):
        assert rank["losses"] == whole["losses"][6:]
        assert rank["weights"] == whole["weights"]
    single = case.but(strategy="single", fields={})
    (alone,) = processes.run(1, toys.run, single.but(folder=str(tmp_path / "pp"), start=6))
    assert alone["losses"] == pytest.approx(unbroken[0]["losses"][6:], abs=1e-5)
    processes.run(1, toys.run, single.but(folder=str(tmp_path / "single"), save=6, steps=6))
    for rank in processes.run(size, toys.run, case.but(folder=str(tmp_path / "single"), start=6)):
        assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-5)


@dataclass(frozen=True)
class Wrong:
    """What is asked of a strategy in one launch, and the words of the refusal."""

    words: str
    fields: dict[str, Any] = field(default_factory=dict)
    world: int = 4
    micro_batches: int = 4
    uneven: bool = False
    compile: CompileSettings | None = None
    share: int = 840  # samples, which divide by 1 to 8


REFUSED = {
    "alone": Wrong("a pipeline has 2 ranks or more, here pipe 1", world=1),
    "not whole": Wrong(r"4 processes / \(strategy\.pipe 3", {"pipe": 3, "replicate": None}),
    "stages for 1F1B": Wrong("stages_per_rank=2: 1F1B wants 1; strategy.schedule=Interl", {"stages_per_rank": 2}),
    "stages for a V": Wrong("wants 2", {"schedule": "DualPipeV", "stages_per_rank": 3}, world=2),
    "uneven": Wrong("loop.uneven=true: .* of one size; strategy=ddp or fsdp takes it", uneven=True),
    "rounds": Wrong("cannot run 7 .* nearest: loop.micro_batches=6 or 8", {"schedule": "Interleaved1F1B"}, 2, 7),
    "rounds that divide": Wrong(
        "nearest: loop.micro_batches=2 or 4; G", {"schedule": "Interleaved1F1B"}, 2, 5, share=40
    ),
    "rounds too": Wrong("cannot run 5 .* loop.micro_batches=4 or 6", {"schedule": "InterleavedZeroBubble"}, 2, 5),
    "too few": Wrong("cannot run 2 .* over 4 stages .* loop.micro_batches=4 or 5", {"schedule": "DualPipeV"}, 2, 2),
    "compiled": Wrong(
        "compile.mode=default: ZBVZeroBubble computes", {"schedule": "ZBVZeroBubble"}, 2, compile=CompileSettings()
    ),
    "cuda graphs": Wrong("CUDA graphs keep one micro-batch, and", world=2, compile=CompileSettings("reduce-overhead")),
    "two backwards": Wrong(
        "activation_checkpointing=operators: DualPipeV runs two",
        {"schedule": "DualPipeV", "activation_checkpointing": "operators"},
        2,
    ),
    "released": Wrong(
        "reshard_after_forward=true: ZBV", {"schedule": "ZBVZeroBubble", "reshard_after_forward": True}, 2
    ),
    "not gathered": Wrong("param_dtype=bf16 is for strategy.shard > 1", {"param_dtype": "bf16"}),
    "too many stages": Wrong("has parts for 4 stages, 8 were asked for", {"schedule": "LoopedBFS"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_pipeline_cannot_do_is_refused_before_any_group(case: str) -> None:
    wrong = REFUSED[case]
    strategy = PP(machine=Machine(device="cpu", compile=wrong.compile), **wrong.fields)
    with pytest.raises(Refusal, match=wrong.words):  # noqa: PT012 (in the order in which a run asks)
        strategy.data_ranks(wrong.world)
        strategy.refuse_compile()
        strategy.refuse_shares(wrong.world, wrong.share, wrong.micro_batches, wrong.uneven)
        strategy.check(Weighted(), Layers(), wrong.world)
        strategy.refuse_forward(Weighted(), Layers(), wrong.world, lambda: samples(0, 2))


@pytest.mark.long
def test_what_torch_can_run_is_not_refused(train: Any) -> None:
    for schedule, micro_batches in (("Interleaved1F1B", 3), ("InterleavedZeroBubble", 6), ("LoopedBFS", 3)):
        run = Run({"schedule": schedule}, micro_batches=micro_batches)
        same(train(2, run), train(1, run.alone())[0])


def test_values_without_a_gradient_and_unlike_micro_batches_end_in_words(processes: Processes) -> None:
    for size in (2, 4):
        with pytest.raises(AssertionError, match="what a stage hands on needs what only an earlier stage knows"):
            processes.run(size, learn, Run({"pipe": 2, "replicate": size // 2}, network="recalling"))
    with pytest.raises(AssertionError, match="differ in shape, and those of a pipeline must be alike"):
        processes.run(2, learn, Run({}, samples=25))


def test_the_word_for_its_degrees() -> None:
    words = {(1, 1, 1): "pp", (2, 1, 1): "ddp_pp", (None, 1, 1): "ddp_pp", (2, 2, 1): "fsdp_pp", (1, 1, 2): "pp_tp"}
    for (replicate, shard, tensor), word in words.items():
        assert PP(replicate=replicate, shard=shard, tensor=tensor).name == word
