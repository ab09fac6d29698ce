"""Parts that are frozen, and parts that learn at a rate of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.options import options
from tests.ranks import Processes
from tests.run import TRANSFORMER, Finished, far, quickly, run
from tests.test_initial_weights import IMAGES, STILL, everything, saved

WORDS = (*IMAGES, *TRANSFORMER, "loop.global_batch=8", "loop.log_every=1", "loop.eval_every=null", "precision=fp64")
# one block does not learn, one slowly, the head fast and without decay
TUNED = (
    "model.freeze=[embed,position,blocks.0]",
    "optimizer.groups=[{pattern:'blocks.*',lr:1e-4},{pattern:head,lr:0.01,weight_decay:0}]",
)
FROZEN = ("embed.", "position", "blocks.0.")


def tuned(place: Path, strategy: str = "single", *more: str, ranks: int = 1) -> Finished:
    words = [*WORDS, *TUNED, f"strategy={strategy}", "run.dir=run", "loop.steps=4", *more]
    return run(words, ranks, "group" if ranks > 1 else "here", place=place)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four steps in one process."""
    return tuned(tmp_path_factory.mktemp("reference"))


def apart(one: Finished, other: Finished) -> float:
    """The largest difference of two runs' weights."""
    ours, theirs = saved(one.folder), saved(other.folder)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_what_is_frozen_stays_and_each_part_has_its_rate_by_the_schedule(reference: Finished, tmp_path: Path) -> None:
    said = (reference.folder / "logs/rank-0.log").read_text()
    assert ", of which " in said
    assert "optimizer   blocks.*: lr 0.0001; " in said
    # an optimizer's memory of what learns, and of nothing else
    names = everything(reference.folder)
    assert not [name for name in names if name.startswith(tuple(f"optimizer/{part}" for part in FROZEN))]
    assert "optimizer/blocks.1.mlp.up.weight/exp_avg" in names
    # a step of Adam is about as long as its rate
    first = tuned(tmp_path, "single", "loop.steps=1", "schedule=constant", "schedule.warmup=2")
    begun = run([*WORDS, *STILL, "strategy=single", "loop.steps=1", "run.dir=begun"], place=tmp_path)
    after = saved(first.folder)
    moved = {name: float((after[name] - value).abs().max()) for name, value in saved(begun.folder).items()}
    assert all((moved[name] == 0) == name.startswith(FROZEN) for name in moved)
    assert moved["blocks.1.mlp.up.weight"] == pytest.approx(0.5e-4, rel=0.2)
    assert moved["head.bias"] == pytest.approx(0.005, rel=0.2)
    assert moved["norm.bias"] == pytest.approx(0.5e-3, rel=0.2)


SPREAD: list[tuple[str, int]] = [("ddp", 2), ("zero1", 2), ("tp", 2), ("fsdp", 2), ("fsdp_tp", 4), ("pp", 2)]


@pytest.mark.parametrize(("strategy", "ranks"), quickly(SPREAD, ("zero1", 2), ("tp", 2)))
def test_one_curve_under_every_strategy(
    processes: Processes, reference: Finished, tmp_path: Path, strategy: str, ranks: int
) -> None:
    done = tuned(tmp_path, strategy, f"loop.micro_batches={1 + (strategy == 'pp')}", ranks=ranks)
    assert far(done.curve(), reference.curve()) < 1e-12
    assert done.curve("lr") == reference.curve("lr")
    assert apart(done, reference) < 1e-10
    assert everything(done.folder).keys() == everything(reference.folder).keys()


FIRST, LAST = "model.freeze=[backbone]", "model.freeze=[blocks.2,blocks.3,norm,head]"


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "freeze"), [("1F1B", FIRST), ("ZBVZeroBubble", LAST)])
def test_a_stage_may_be_frozen_as_a_whole(processes: Processes, tmp_path: Path, schedule: str, freeze: str) -> None:
    frozen = (freeze, "optimizer.groups=[]", "loop.micro_batches=4", "loop.steps=2", "model.depth=4")
    alone = tuned(tmp_path, "single", *frozen)
    spread = tuned(tmp_path, "pp", *frozen, f"strategy.schedule={schedule}", "run.dir=pp", ranks=2)
    assert far(spread.curve(), alone.curve()) < 1e-12
    assert apart(spread, alone) < 1e-10


def test_a_run_goes_on_with_its_rates_and_no_other_ones(reference: Finished, tmp_path: Path) -> None:
    tuned(tmp_path, "single", "loop.save_every=2")
    on = tuned(tmp_path, "single", "run.resume=run/checkpoints/step-00000002", "run.dir=on")
    assert [line["loss"] for line in on.lines("train")] == reference.curve()[2:]
    assert apart(on, reference) == 0
    for word in ("model.freeze=[embed]", "optimizer.groups=[]"):
        said = run([*WORDS, *TUNED, "run.dir=run", word, "loop.steps=5"], place=tmp_path, code=2).out
        assert "these changes change what it learns" in said


@pytest.mark.parametrize(
    ("freeze", "still"),
    [
        ("[backbone]", ("bn1", "layer1.0.bn1", "layer1.0.bn2", "layer4.1.bn2")),
        ("[bn1.weight,bn1.bias,layer1.*.bn1]", ("bn1", "layer1.0.bn1")),
    ],
)
def test_statistics_of_a_norm_that_is_frozen_stay(tmp_path: Path, freeze: str, still: tuple[str, ...]) -> None:
    words = [
        *IMAGES,
        "loop.steps=2",
        "loop.global_batch=8",
        "strategy=single",
        "model=resnet18",
        f"model.freeze={freeze}",
    ]
    after = saved(run([*words, "run.dir=run"], place=tmp_path).folder)
    for name in ("bn1", "layer1.0.bn1", "layer1.0.bn2", "layer4.1.bn2"):
        assert bool((after[f"{name}.running_mean"] == 0).all()) == (name in still), name


class Freezer(nn.Module):
    def __init__(self, freeze: Any = ()) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


class Tied(nn.Module):
    """A table and a head that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Linear(64, 10, bias=False), nn.Linear(64, 10)
        self.head.weight = self.table.weight
        self.calls = 0
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen += 1
            assert self.calls == int(self.seen)  # trials undo what a forward counts
        return self.head(x.flatten(1)) + self.table(x.flatten(1))


def test_a_rule_counts_for_a_tied_weight_by_any_of_its_names_and_trials_count_nothing(tmp_path: Path) -> None:
    words = [*options(tmp_path, Tied), "model=tied", "loop.steps=2", "loop.eval_every=null", "loop.global_batch=8"]
    words += ["optimizer.lr=1e-3", "schedule=constant", "optimizer.groups=[{pattern:head.weight,lr:0}]"]
    begun = saved(run([*words, "loop.steps=1", "run.dir=one"], place=tmp_path).folder)
    after = saved(run([*words, "run.dir=two"], place=tmp_path).folder)
    assert torch.equal(after["table.weight"], begun["table.weight"])
    assert not torch.equal(after["head.bias"], begun["head.bias"])
    assert (int(begun["seen"]), int(after["seen"])) == (1, 2)


RPROP = ["optimizer=sgd", "optimizer._target_=torch.optim.Rprop", "~optimizer.momentum", "~optimizer.nesterov"]
RPROP += ["~optimizer.weight_decay"]
REFUSED: list[tuple[list[str], str]] = [
    (["model.freeze=[block.0]"], "model.freeze: 'block.0' matches no parameter of VisionTransformer; "),
    (["model.freeze=[backbone,head]"], "no trainable parameter; model.freeze=['backbone', 'head'] leaves none"),
    (["model.freeze=head"], "model.freeze=head: expected a list"),
    (["optimizer.groups=[{pattern:heads,lr:1}]"], "optimizer.groups: 'heads' matches no parameter "),
    (["optimizer.groups=[{pattern:blocks.0,lr:1}]"], "every parameter of 'blocks.0' is frozen; leave this group out"),
    (["optimizer.groups=[{pattern:head}]"], "expected a list like [{pattern: backbone, lr: 1e-4}]"),
    (["optimizer.groups=[{pattern:head,lr:-1}]"], "expected a list like [{pattern: backbone, lr: 1e-4}]"),
    ([*RPROP, "optimizer.groups=[{pattern:head,weight_decay:1}]"], "head: weight_decay 1, but Rprop has"),
    (["model=cnn", "model.freeze=[backbone]"], "model.freeze: CNN does not say what its backbone is"),
    (["model=freezer"], "model.freeze is a key of the framework's own, and tests"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_means_nothing_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    own: list[Any] = [word for word in (*WORDS, *TUNED) if not (words[0].startswith("model=") and "model" in word)]
    assert said in run([*options(tmp_path, Freezer), *own, *words, "run.dir=run"], place=tmp_path, code=2).out
    assert not (tmp_path / "run").exists()
