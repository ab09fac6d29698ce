"""Parts that are frozen, and parts that learn at a rate of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from recipes.vision.zoo import torchvision_model
from tests.commands import TRANSFORMER, curve
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from tests.test_initial_weights import IMAGES, saved
from trainer.learning.freezing import count_trainable, freeze, preserve_untrained
from trainer.learning.optimizer import parameter_groups
from trainer.learning.parameter_patterns import Rule, matches_exactly, resolve_rules
from trainer.messages import Refusal
from trainer.parallel.batch_norm import local_batch_norms, synchronise_batch_norms
from trainer.parallel.meta_model import build_meta_model
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager

WORDS = (*IMAGES, *TRANSFORMER, "loop.global_batch=8", "loop.log_every=1", "loop.eval_every=null", "precision=fp64")
# one block does not learn, one slowly, the head fast and without decay
TUNED = (
    "model.freeze=[embed,position,blocks.0]",
    "optimizer.groups=[{pattern:'blocks.*',lr:1e-4},{pattern:head,lr:0.01,weight_decay:0}]",
)
FROZEN = ("embed.", "position", "blocks.0.")


def tensors_of(folder: Path) -> set[str]:
    """Names of everything in a run's newest checkpoint."""
    found = CheckpointManager(folder / "checkpoints", Ranks()).newest()
    assert found is not None
    return set(found.tensors)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in one process."""
    home = tmp_path_factory.mktemp("reference")
    assert product_of(1, home, "single") == [0]
    return home / "run"


def product_of(size: int, home: Path, strategy: str, *more: str, processes: Processes | None = None) -> list[int]:
    from trainer.launch.rendezvous import Launch

    words = [*WORDS, *TUNED, f"strategy={strategy}", "run.dir=run", "loop.steps=4", *more]
    return processes.run(size, product, home, words) if processes else [product(Launch(), home, words)]


def far(one: Path, other: Path) -> float:
    """The largest difference of two runs' weights."""
    ours, theirs = saved(one), saved(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_what_is_frozen_stays_and_each_part_has_its_rate(reference: Path, tmp_path: Path) -> None:
    begun = freeze(VisionTransformer(10, 3, 8, width=24, heads=4, depth=2), ["backbone"])
    assert count_trainable(begun) == 24 * 10 + 10
    said = (reference / "logs/rank-0.log").read_text()
    assert ", of which " in said
    assert "optimizer   blocks.*: lr 0.0001; " in said
    # an optimizer's memory of what learns, and of nothing else
    names = tensors_of(reference)
    assert not [name for name in names if name.startswith(tuple(f"optimizer/{part}" for part in FROZEN))]
    assert "optimizer/blocks.1.mlp.up.weight/exp_avg" in names
    # a step of Adam is about as long as its rate
    assert product_of(1, tmp_path, "single", "loop.steps=1", "schedule=constant") == [0]
    first = saved(tmp_path / "run")
    torch.manual_seed(0)
    moved = {name: float((first[name] - value).abs().max()) for name, value in before().items()}
    assert all((moved[name] == 0) == name.startswith(FROZEN) for name in moved)
    assert moved["blocks.1.mlp.up.weight"] == pytest.approx(1e-4, rel=0.2)
    assert moved["head.bias"] == pytest.approx(0.01, rel=0.2)
    assert moved["norm.bias"] == pytest.approx(1e-3, rel=0.2)


def before() -> dict[str, torch.Tensor]:
    """The network of these runs as the seed makes it."""
    from trainer.data.rng import seed_all

    seed_all(0)
    network = VisionTransformer(10, 3, 8, width=24, heads=4, depth=2)
    return {name: value.double() for name, value in network.state_dict().items()}


SPREAD: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (2, ()),
    "zero1": (2, ()),
    "tp": (2, ()),
    "fsdp": (2, ()),
    "pp": (2, ("loop.micro_batches=2",)),
    "fsdp_tp": (4, ()),
    "fsdp_pp": (4, ()),
}


@pytest.mark.long
@pytest.mark.parametrize("strategy", quickly(SPREAD, "ddp", "zero1", "tp", "fsdp", "pp"))
def test_one_curve_under_every_strategy(processes: Processes, reference: Path, tmp_path: Path, strategy: str) -> None:
    size, more = SPREAD[strategy]
    assert product_of(size, tmp_path, strategy, *more, processes=processes) == [0] * size
    assert curve(tmp_path / "run") == pytest.approx(curve(reference), abs=1e-12)
    assert curve(tmp_path / "run", "lr") == curve(reference, "lr")
    assert far(tmp_path / "run", reference) < 1e-10
    assert tensors_of(tmp_path / "run") == tensors_of(reference)


FIRST, LAST = "model.freeze=[backbone]", "model.freeze=[blocks.2,blocks.3,norm,head]"


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "freeze"),
    quickly(
        [("1F1B", FIRST), ("1F1B", LAST), ("InterleavedZeroBubble", FIRST), ("ZBVZeroBubble", LAST)],
        ("1F1B", FIRST),
        ("ZBVZeroBubble", LAST),
    ),
)
def test_a_stage_may_be_frozen_as_a_whole(processes: Processes, tmp_path: Path, schedule: str, freeze: str) -> None:
    frozen = (freeze, "optimizer.groups=[]", "loop.micro_batches=4", "loop.steps=2", "model.depth=4")
    assert product_of(1, tmp_path, "single", *frozen) == [0]
    more = (*frozen, f"strategy.schedule={schedule}", "run.dir=pp")
    assert product_of(2, tmp_path, "pp", *more, processes=processes) == [0, 0]
    assert curve(tmp_path / "pp") == pytest.approx(curve(tmp_path / "run"), abs=1e-12)
    assert far(tmp_path / "pp", tmp_path / "run") < 1e-10


def test_a_run_goes_on_with_its_rates(reference: Path, tmp_path: Path) -> None:
    assert product_of(1, tmp_path, "single", "run.stop_after=null", "loop.save_every=2") == [0]
    half = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert product_of(1, tmp_path, "single", f"run.resume={half}", "run.dir=on") == [0]
    assert curve_from(tmp_path / "on", 3) == curve(reference)[2:]
    assert far(tmp_path / "on", reference) == 0
    for word in ("model.freeze=[embed]", "optimizer.groups=[]"):
        with pytest.raises(Refusal, match="these changes change what it learns"):
            product_of(1, tmp_path, "single", word, "loop.steps=5")


def curve_from(folder: Path, step: int) -> list[Any]:
    from tests.commands import lines

    return [line["loss"] for line in lines(folder, "train") if line["step"] >= step]


@pytest.mark.parametrize("make", [resnet18, lambda *sizes: torchvision_model("mobilenet_v3_small", *sizes)])
def test_statistics_of_what_is_frozen_stay(make: Any) -> None:
    network = freeze(make(10, 3, 32), ["backbone"])
    whole = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()
    network(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(torch.equal(value, whole[name]) for name, value in network.state_dict().items())
    learning = {name.split(".")[0] for name, one in network.named_parameters() if one.grad is not None}
    assert learning == {name.split(".")[0] for name in list(whole)[-1:]}
    assert local_batch_norms(network) == []  # nothing in them depends on ranks
    assert synchronise_batch_norms(network, Ranks(), torch.device("cpu")) is network


def test_a_norm_is_frozen_where_its_scale_and_shift_are() -> None:
    network = freeze(resnet18(10, 3, 32).train(), ["bn1.weight", "bn1.bias", "layer1.*.bn1"]).train()
    still = {name for name, module in network.named_modules() if "bn" in name and not module.training}
    assert still == {"bn1", "layer1.0.bn1", "layer1.1.bn1"}
    outlined, why = build_meta_model(lambda: freeze(resnet18(10, 3, 32), ["layer1"]))
    assert (why, outlined.get_parameter("layer1.0.conv1.weight").requires_grad) == ("", False)


REFUSED = {
    "model.freeze=[block.0]": r"model\.freeze: 'block\.0' matches no parameter of VisionTransformer; .*'blocks\.0",
    "model.freeze=[backbone,head]": r"no trainable parameter; model\.freeze=\['backbone', 'head'\] leaves none",
    "model.freeze=head": r"model\.freeze=head: expected a list",
    "optimizer.groups=[{pattern:heads,lr:1}]": r"optimizer\.groups: 'heads' matches no parameter .*'head",
    "optimizer.groups=[{pattern:blocks.0,lr:1}]": r"every parameter of 'blocks\.0' is frozen; leave this group out",
    "optimizer.groups=[{pattern:head}]": r"expected a list like \[\{pattern: backbone, lr: 1e-4\}\]",
    "optimizer.groups=[{pattern:head,rate:1}]": r"expected a list like \[\{pattern: backbone, lr: 1e-4\}\]",
    "optimizer.groups=[{pattern:head,lr:-1}]": r"expected a list like \[\{pattern: backbone, lr: 1e-4\}\]",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_means_nothing_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=f"(?s){REFUSED[word]}"):
        here(*WORDS, *TUNED, word, f"run.dir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_networks_that_name_no_backbone_and_optimizers_that_know_no_decay_say_so(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"model\.freeze: CNN does not say what its backbone is; its parts are"):
        here(*IMAGES, "loop.global_batch=8", "model=cnn", "model.freeze=[backbone]", f"run.dir={tmp_path}")
    words = ("optimizer=sgd", "optimizer._target_=torch.optim.Rprop", "~optimizer.momentum", "~optimizer.nesterov")
    with pytest.raises(Refusal, match=r"head: weight_decay 1, but Rprop has no weight_decay"):
        here(*WORDS, *words, "~optimizer.weight_decay", "optimizer.groups=[{pattern:head,weight_decay:1}]")


class Freezer(nn.Module):
    def __init__(self, freeze: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


def test_a_network_whose_own_parameter_has_the_frameworks_name_is_refused() -> None:
    network = ("model=mlp", "model._target_=tests.test_fine_tuning.Freezer", "trust=[tests]")
    bare = [f"~model.{key}" for key in ("num_classes", "channels", "image_size", "width", "depth")]
    with pytest.raises(Refusal, match=r"model\.freeze is a key of the framework's own, and tests.*Freezer has a param"):
        here(*network, *bare)


def test_patterns_are_fnmatchs() -> None:
    assert [name for name in ("layer1", "layer2", "layer4") if matches_exactly("layer[1-3]", name)] == [
        "layer1",
        "layer2",
    ]
    assert [name for name in ("layer1", "layer2") if matches_exactly("layer[!1]", name)] == ["layer2"]


def test_a_rule_counts_for_a_tied_weight_by_any_of_its_names() -> None:
    network = nn.ModuleDict({"table": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    network["head"].weight = network["table"].weight
    rules = resolve_rules(network, (Rule("head", lr=0.5),))
    assert parameter_groups(network, False, rules)[1] == {"params": [network["table"].weight], "lr": 0.5}


def test_a_trial_undoes_what_a_forward_counts() -> None:
    class Counts(nn.Linear):
        calls = 0
        seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            return super().forward(x)

    network = Counts(2, 2)
    network.register_buffer("seen", torch.zeros(()))
    network(torch.zeros(1, 2))
    with preserve_untrained(network):
        network(torch.zeros(1, 2))
    assert network.calls == int(network.seen) == 1
