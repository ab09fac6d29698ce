"""A run that begins with weights of others: every form in which people have them, under every strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.commands import TRANSFORMER, curve, lines
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import Net
from trainer.jobs.initial_weights import InitialWeights
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.meta_model import build_meta_model
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager

IMAGES = ("data=synthetic_images", "data.size=32", "data.evaluation_size=0", "data.image_size=8")
WORDS = (*IMAGES, "loop.global_batch=8", "loop.log_every=1", "schedule=constant", "loop.steps=1")


def saved(folder: Path) -> dict[str, Tensor]:
    """The network in the newest checkpoint of a run."""
    checkpoints = CheckpointManager(folder / "checkpoints", Ranks())
    found = checkpoints.newest()
    assert found is not None
    own = {name: torch.empty_like(one, device="cpu") for name, one in found.tensors.items() if "/" not in name}
    checkpoints.read(found, own)
    return own


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights no other seed has."""
    home = tmp_path_factory.mktemp("source")
    assert product(Launch(), home, [*WORDS, *TRANSFORMER, "seed=1", "run.dir=run"]) == 0
    return home / "run"


SPREAD = {"single": 1, "ddp": 2, "zero1": 2, "tp": 2, "fsdp": 2, "pp": 2}


@pytest.mark.parametrize("strategy", quickly(SPREAD, "single", "fsdp", "pp"))
def test_every_strategy_begins_with_the_weights_of_a_run(
    processes: Processes, source: Path, tmp_path: Path, strategy: str
) -> None:
    words = [*WORDS, *TRANSFORMER, f"strategy={strategy}", f"init_from={source}", "seed=2", "optimizer.lr=0"]
    assert processes.run(SPREAD[strategy], product, tmp_path, [*words, "run.dir=next"]) == [0] * SPREAD[strategy]
    assert equal(saved(tmp_path / "next"), saved(source))  # after a step of no length
    names = len(saved(source))
    assert f"weights     {names} tensors from {source}" in (tmp_path / "next/logs/rank-0.log").read_text()


class Hollow(nn.Module):
    """A network whose constructor must not be asked for values."""

    def __init__(self, num_classes: int, channels: int, image_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels * image_size**2, num_classes)
        if not self.linear.weight.is_meta:
            raise RuntimeError("somebody has built it")

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1))


def test_nobody_builds_values_that_a_file_gives(processes: Processes, tmp_path: Path) -> None:
    given = {"linear.weight": torch.randn(10, 192), "linear.bias": torch.randn(10)}
    save_file(given, tmp_path / "hollow.safetensors")
    network = [
        "model=mlp",
        "model._target_=tests.test_initial_weights.Hollow",
        "~model.width",
        "~model.depth",
        "trust=[tests]",
    ]
    words = [*WORDS, *network, "strategy=fsdp", "init_from=hollow.safetensors", "optimizer.lr=0", "run.dir=run"]
    assert processes.run(2, product, tmp_path, words) == [0, 0]
    assert equal(saved(tmp_path / "run"), given)


def in_shards(state: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    names = list(state)
    for file, own in (("a.safetensors", names[:3]), ("b.safetensors", names[3:])):
        save_file({name: state[name] for name in own}, folder / file)
    table = {name: "a.safetensors" if name in names[:3] else "b.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def as_bin(state: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


FORMS: dict[str, Callable[[dict[str, Tensor], Path], Any]] = {
    "net.safetensors": save_file,
    "net.pt": torch.save,
    "module.pt": lambda state, path: torch.save({"epoch": 3, "model_state_dict": under("module.", state)}, path),
    "compiled.pth": lambda state, path: torch.save(
        {"model": under("module._orig_mod.", state)}, path, _use_new_zipfile_serialization=False
    ),
    "lightning.ckpt": lambda state, path: torch.save({"state_dict": under("net.", state), "loops": {}}, path),
    "half.pt": lambda state, path: torch.save({name: one.half().float() for name, one in state.items()}, path),
    "shards": in_shards,
    "bin": as_bin,
}


@pytest.mark.parametrize("form", quickly(FORMS, "net.safetensors", "lightning.ckpt", "half.pt", "shards"))
def test_every_form_gives_the_same_values(form: str, tmp_path: Path) -> None:
    state = {name: value.half().float() for name, value in Net().state_dict().items()}
    FORMS[form](state, tmp_path / form)
    initial, network = InitialWeights(str(tmp_path / form), "-loss"), Net()
    initial.find(build_meta_model(Net)[0])  # names and shapes are enough
    initial.load_into(network)
    assert equal(network.state_dict(), state)
    assert initial.is_complete
    done = ", its net.*" if form == "lightning.ckpt" else ""
    assert initial.lines == [f"weights     {len(state)} tensors from {tmp_path / form}{done}"]


class Echoes(nn.Module):
    """A network whose parts are called what wrappers put in front of names; all its tensors have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        for name in ("module", "_orig_mod"):
            self.add_module(name, nn.PReLU(3))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "net."])
def test_a_part_that_is_called_as_a_wrapper_is_keeps_its_name(tmp_path: Path, prefix: str) -> None:
    state = {name: torch.randn(3) for name in Echoes().state_dict()}
    save_file(under(prefix, state), tmp_path / "net.safetensors")
    initial, network = InitialWeights(str(tmp_path / "net.safetensors"), "-loss"), Echoes()
    initial.find(network)
    initial.load_into(network)
    assert equal(network.state_dict(), state)


def test_a_tensor_that_only_the_file_has_takes_nobodys_place(tmp_path: Path) -> None:
    given = {"weight": torch.randn(3), "module.weight": torch.randn(3), "my_orig_mod.weight": torch.randn(3)}
    torch.save(given, tmp_path / "net.pt")
    initial, network = InitialWeights(str(tmp_path / "net.pt"), "-loss"), nn.PReLU(3)
    initial.find(network)
    initial.load_into(network)
    assert torch.equal(network.weight, given["weight"])
    assert initial.lines[1] == "weights     2 not of this network, not loaded: module.weight, my_orig_mod.weight"


def test_a_part_of_the_network_may_be_all_that_a_file_has(tmp_path: Path) -> None:
    state = Net().state_dict()
    save_file(state, tmp_path / "net.safetensors")
    network = nn.ModuleDict({"head": nn.Linear(4, 2), "inner": Net()})
    initial = InitialWeights(str(tmp_path / "net.safetensors"), "-loss")
    initial.find(network)
    initial.load_into(network)
    assert equal(network["inner"].state_dict(), state)
    assert initial.lines[0] == f"weights     {len(state)} tensors from {tmp_path / 'net.safetensors'}, as inner.*"
    assert initial.lines[1:] == ["weights     2 not there, not loaded: head.weight, head.bias"]


@pytest.mark.parametrize("copied", [True, False])
def test_nothing_frozen_stays_random_or_a_copy_of_what_is_replaced(tmp_path: Path, copied: bool) -> None:
    def build(add: int = 0) -> nn.Module:
        torch.manual_seed(0 if copied else add)
        policy, still = Net(), nn.Linear(2, 2).requires_grad_(False)
        nn.init.eye_(still.weight)  # what is made without chance may stay
        nn.init.zeros_(still.bias)
        reference = deepcopy(policy) if copied else Net()
        return nn.ModuleDict({"policy": policy, "reference": reference.requires_grad_(False), "still": still})

    state = {f"{part}.{name}": one for part in ("policy", "reference") for name, one in Net().state_dict().items()}
    save_file(Net().state_dict(), tmp_path / "one.safetensors")
    save_file(state, tmp_path / "both.safetensors")
    said = r"\d frozen tensors would stay as built: reference.up.weight.* as policy.*; \d of them it gives as reference"
    with pytest.raises(Refusal, match=said):
        InitialWeights(str(tmp_path / "one.safetensors"), "-loss").find(build(), build)
    InitialWeights(str(tmp_path / "both.safetensors"), "-loss").find(build(), build)


def test_what_does_not_fit_stays_as_built_and_is_named(tmp_path: Path) -> None:
    state: dict[str, Tensor] = {name: torch.full_like(value, 5.0) for name, value in Net().state_dict().items()}
    del state["norm.bias"], state["scale"]
    state |= {"head.weight": torch.zeros(7, 12), "head.bias": torch.zeros(7), "extra.bias": torch.zeros(3)}
    torch.save(state, tmp_path / "net.pt")
    initial, network = InitialWeights(str(tmp_path / "net.pt"), "-loss"), Net()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    initial.find(network)
    initial.load_into(network)
    assert initial.lines[1:] == [
        "weights     2 of another shape, not loaded: head.weight (7, 12) → (4, 12), head.bias (7,) → (4,)",
        "weights     2 not there, not loaded: norm.bias, scale",
        "weights     1 not of this network, not loaded: extra.bias",
    ]
    assert not initial.is_complete
    for name, value in network.state_dict().items():
        fresh = name.startswith(("head", "scale", "norm.bias"))
        assert torch.equal(value, before[name] if fresh else torch.full_like(value, 5.0)), name


class Hostile:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("canary"),)


def damaged(path: Path) -> None:
    path.write_bytes(b"no weights at all")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing.pt": (lambda path: None, "nothing.pt does not exist; give pretrained, a run folder"),
    "hostile.pt": (lambda path: torch.save({"weights": Hostile()}, path), r"only running code could read; write"),
    "damaged.pt": (damaged, "torch cannot read it; write its tensors alone"),
    "damaged.safetensors": (damaged, r"damaged\.safetensors: "),
    "empty": (Path.mkdir, "holds no checkpoint, and none of model.safetensors"),
    "list.pt": (lambda path: torch.save([torch.ones(3)], path), "holds no tensor by name"),
    "other.pt": (
        lambda path: torch.save({"a.weight": torch.ones(3), "b.weight": torch.ones(3)}, path),
        r"no name in .*other.pt is one of VisionTransformer's; there: a.weight, b.weight; here: position, embed.weight",
    ),
    "head.pt": (
        lambda path: torch.save({"head.bias": torch.ones(3)}, path),
        r"has the shape that VisionTransformer has for it: head.bias \(3,\) → \(10,\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_before_anything_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, said = REFUSED[name]
    make(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=rf"(?s)init_from={name}: .*{said}"):
        here(*WORDS, *TRANSFORMER, f"init_from={name}", "run.dir=run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "canary").exists()


def test_a_damaged_checkpoint_is_refused_and_two_beginnings_are(source: Path, tmp_path: Path) -> None:
    begin = (*WORDS, *TRANSFORMER, f"init_from={source}", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(Refusal, match="a run goes on from a checkpoint or begins with weights of others, not both"):
        here(*begin, f"run.resume={source}")
    with pytest.raises(Refusal, match=r"VisionTransformer has no published weights; .*pretrained"):
        here(*WORDS, *TRANSFORMER, "init_from=pretrained", f"run.dir={tmp_path / 'run'}")
    checkpoint = tmp_path / "copy"
    checkpoint.mkdir()
    for file in next((source / "checkpoints").iterdir()).iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-1] ^= 1
        (checkpoint / file.name).write_bytes(data)
    with pytest.raises(Refusal, match="SHA-256 differs"):
        here(*WORDS, *TRANSFORMER, f"init_from={checkpoint}", f"run.dir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_needs_the_file_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*WORDS, *TRANSFORMER, "run.dir=run")
    assert here(*words, "seed=1", "run.dir=first") == 0
    torch.save(saved(tmp_path / "first"), "weights.pt")
    assert here(*words, "init_from=weights.pt") == 0
    Path("weights.pt").unlink()
    assert here(*words, "init_from=weights.pt", "loop.steps=2") == 0
    assert len(curve(tmp_path / "run")) == 2
    assert "note        init_from is ignored, because the run resumes" in (tmp_path / "run/logs/rank-0.log").read_text()
    assert here(*words, "loop.steps=3") == 0  # nor the word: the checkpoint has every value
    with pytest.raises(Refusal, match=r"weights\.pt does not exist"):
        here(*words, "init_from=weights.pt", "run.resume=fresh")
    assert len(curve(tmp_path / "run")) == 3  # and nothing has moved


def test_of_a_run_the_best_checkpoint_counts_and_the_newest_where_none_is_known(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "checkpoints", Ranks(), best="accuracy")
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        state = {name: torch.full_like(value, float(step)) for name, value in Net().state_dict().items()}
        checkpoints.save(step, state, {}, {"accuracy": accuracy})
    for best, wanted in (("accuracy", 2.0), ("-accuracy", 1.0), ("rms", 3.0)):
        initial, network = InitialWeights(str(tmp_path), best), Net()
        initial.find(network)
        initial.load_into(network)
        assert all((value == wanted).all() for value in network.state_dict().values())


@pytest.mark.long
def test_a_run_says_by_which_figure_it_is_taken_and_of_an_average_its_weights(tmp_path: Path) -> None:
    words = [*(word for word in WORDS if "evaluation" not in word), "data.evaluation_size=16", *TRANSFORMER]
    old = [*words, "seed=1", "loop.steps=4", "loop.eval_every=1", "ema.decay=0.5", "checkpoint.best=-ema_loss"]
    assert product(Launch(), tmp_path, [*old, "run.dir=old"]) == 0
    # this run looks for another figure; the old one's counts
    assert product(Launch(), tmp_path, [*words, "init_from=old", "optimizer.lr=0", "run.dir=new"]) == 0
    said = (tmp_path / "new/logs/rank-0.log").read_text()
    figures = lines(tmp_path / "old", "eval")
    best = min(figures, key=lambda line: line["ema_loss"])
    assert f"step-{best['step']:08d} (best ema_loss: {best['ema_loss']:.4f}); of the moving average" in said
    assert lines(tmp_path / "new", "eval")[0]["loss"] == pytest.approx(best["ema_loss"], rel=1e-6)
