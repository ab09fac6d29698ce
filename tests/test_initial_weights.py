"""A run that begins with weights of others: every form in which people have them, under every strategy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.options import options
from tests.ranks import Processes
from tests.run import TRANSFORMER, quickly, run
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager

IMAGES = ("data=synthetic_images", "data.size=32", "data.evaluation_size=0", "data.image_size=8")
WORDS = (*IMAGES, "loop.global_batch=8", "loop.log_every=1", "schedule=constant", "loop.steps=1")
STILL = ("optimizer=sgd", "optimizer.lr=0", "optimizer.weight_decay=0")  # a step of no length


def everything(folder: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint of a run."""
    checkpoints = CheckpointManager(folder / "checkpoints", Ranks())
    found = checkpoints.newest()
    assert found is not None
    tensors = {name: torch.empty_like(one, device="cpu") for name, one in found.tensors.items()}
    checkpoints.read(found, tensors)
    return tensors


def saved(folder: Path) -> dict[str, Tensor]:
    """The network in the newest checkpoint of a run."""
    return {name: one for name, one in everything(folder).items() if "/" not in name}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights no other seed has."""
    return run([*WORDS, *TRANSFORMER, "seed=1", "run.dir=run"], place=tmp_path_factory.mktemp("source")).folder


def log_of(folder: Path) -> str:
    return (folder / "logs" / "rank-0.log").read_text()


SPREAD = {"single": 1, "ddp": 2, "zero1": 2, "tp": 2, "fsdp": 2, "pp": 2}


@pytest.mark.parametrize("strategy", quickly(SPREAD, "single", "fsdp", "pp"))
def test_every_strategy_begins_with_the_weights_of_a_run(
    processes: Processes, source: Path, tmp_path: Path, strategy: str
) -> None:
    words = [*WORDS, *TRANSFORMER, f"strategy={strategy}", f"init_from={source}", "seed=2", "optimizer.lr=0"]
    done = run([*words, "run.dir=next"], SPREAD[strategy], "group", place=tmp_path)
    assert equal(saved(done.folder), saved(source))
    assert f"weights     {len(saved(source))} tensors from {source}" in log_of(done.folder)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(64, 12), nn.LayerNorm(12), nn.Linear(12, 10)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.up(x.flatten(1)).relu())) * self.scale


class Whole(nn.Module):
    """A network around another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Net(), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


class Learned(nn.Module):
    """A policy beside its reference, as people learn from preferences; `copied`: one is made of the other."""

    def __init__(self, copied: bool = True) -> None:
        super().__init__()
        self.policy, self.still = Net(), nn.Linear(2, 2).requires_grad_(False)
        nn.init.eye_(self.still.weight)  # what is made without chance may stay
        nn.init.zeros_(self.still.bias)
        self.reference = (deepcopy(self.policy) if copied else Net()).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.policy(x) - self.reference(x)


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., tuple[dict[str, Tensor], str]]:
    """A step of no length of one of these networks from a file: what it has then, and what was said of weights."""
    own = options(tmp_path, Net, Whole, Learned)

    def begin(network: str, file: str, *words: str, code: int = 0, **more: Any) -> tuple[dict[str, Tensor], str]:
        words = (
            *own,
            "loop.steps=1",
            "loop.eval_every=null",
            "loop.global_batch=8",
            *STILL,
            f"model={network}",
            *words,
        )
        done = run([*words, f"init_from={file}", "run.dir=run", "run.resume=fresh"], place=tmp_path, code=code, **more)
        return (saved(done.folder), log_of(done.folder)) if code == 0 else ({}, done.out)

    return begin


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
    "half.pt": lambda state, path: torch.save({name: one.half() for name, one in state.items()}, path),
    "shards": in_shards,
    "bin": as_bin,
}


@pytest.mark.parametrize("form", quickly(FORMS, "net.safetensors", "lightning.ckpt", "half.pt", "shards"))
def test_every_form_gives_the_same_values(form: str, tmp_path: Path, begin: Any) -> None:
    state = {name: value.half().float() for name, value in Net().state_dict().items()}
    FORMS[form](state, tmp_path / form)
    found, said = begin("net", form)
    assert equal(found, state)
    done = ", its net.*" if form == "lightning.ckpt" else ""
    assert re.search(rf"weights     {len(state)} tensors from \S*{form}{re.escape(done)}\n", said), said


def test_a_part_of_the_network_may_be_all_that_a_file_has(tmp_path: Path, begin: Any) -> None:
    state = Net().state_dict()
    save_file(state, tmp_path / "net.safetensors")
    found, said = begin("whole", "net.safetensors")
    assert equal({name[6:]: one for name, one in found.items() if name.startswith("inner.")}, state)
    assert "net.safetensors, as inner.*" in said
    assert "weights     2 not there, not loaded: last.weight, last.bias" in said


@pytest.mark.parametrize("copied", ["true", "false"])
def test_nothing_frozen_stays_random_or_a_copy_of_what_is_replaced(tmp_path: Path, begin: Any, copied: str) -> None:
    save_file(Net().state_dict(), tmp_path / "one.safetensors")
    both = {f"{part}.{name}": one for part in ("policy", "reference") for name, one in Net().state_dict().items()}
    save_file(both, tmp_path / "both.safetensors")
    _, said = begin("learned", "one.safetensors", f"model.copied={copied}", code=2)
    wanted = (
        r"\d frozen tensors would stay as built: reference.up.weight.* as policy.*; \d of them it gives as reference"
    )
    assert re.search(wanted, said), said
    begin("learned", "both.safetensors", f"model.copied={copied}")


def test_what_does_not_fit_stays_as_built_and_is_named(tmp_path: Path, begin: Any) -> None:
    given: dict[str, Tensor] = {name: torch.full_like(value, 5.0) for name, value in Net().state_dict().items()}
    whole = dict(given)
    del given["norm.bias"], given["scale"]
    given |= {"head.weight": torch.zeros(7, 12), "head.bias": torch.zeros(7), "extra.bias": torch.zeros(3)}
    given |= {"module.up.bias": torch.zeros(12)}  # which takes nobody's place
    torch.save(given, tmp_path / "net.pt")
    save_file({"up.weight": whole["up.weight"]}, tmp_path / "little.safetensors")
    found, said = begin("net", "net.pt")
    built, _ = begin("net", "little.safetensors")
    for line in (
        "weights     2 of another shape, not loaded: head.weight (7, 12) → (10, 12), head.bias (7,) → (10,)",
        "weights     2 not there, not loaded: norm.bias, scale",
        "weights     2 not of this network, not loaded: extra.bias, module.up.bias",
    ):
        assert line in said, said
    for name, value in found.items():
        fresh = name.startswith(("head", "scale", "norm.bias"))
        assert torch.equal(value, built[name] if fresh else whole[name]), name


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
    "other.pt": (
        lambda path: torch.save({"a.weight": torch.ones(3), "b.weight": torch.ones(3)}, path),
        r"no name in .*other.pt is one of Net's; there: a.weight, b.weight; here: scale, up.weight",
    ),
    "head.pt": (
        lambda path: torch.save({"head.bias": torch.ones(3)}, path),
        r"has the shape that Net has for it: head.bias \(3,\) → \(10,\)",
    ),
    "pretrained": (lambda path: None, "Net has no published weights; .*pretrained"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_before_anything_is_made(name: str, tmp_path: Path, begin: Any) -> None:
    make, wanted = REFUSED[name]
    make(tmp_path / name)
    _, said = begin("net", name, code=2)
    assert re.search(rf"(?s)(init_from={name}: )?.*{wanted}", said), said
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "canary").exists()


def test_two_beginnings_are_refused(source: Path, tmp_path: Path) -> None:
    words = [*WORDS, *TRANSFORMER, "run.dir=run"]
    said = run([*words, f"init_from={source}", f"run.resume={source}"], place=tmp_path, code=2).out
    assert "a run goes on from a checkpoint or begins with weights of others, not both" in said
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_needs_the_file_no_more(source: Path, tmp_path: Path) -> None:
    words = [*WORDS, *TRANSFORMER, "run.dir=run"]
    torch.save(saved(source), tmp_path / "weights.pt")
    run([*words, "init_from=weights.pt"], place=tmp_path)
    (tmp_path / "weights.pt").unlink()
    done = run([*words, "init_from=weights.pt", "loop.steps=2"], place=tmp_path)
    assert "note        init_from is ignored, because the run resumes" in log_of(done.folder)
    run([*words, "loop.steps=3"], place=tmp_path)  # nor the word: the checkpoint has every value
    said = run([*words, "init_from=weights.pt", "run.resume=fresh"], place=tmp_path, code=2).out
    assert "weights.pt does not exist" in said
    assert len(done.curve()) == 3  # and nothing has moved


def test_of_a_run_the_best_checkpoint_counts_by_its_own_figure_and_of_an_average_its_weights(tmp_path: Path) -> None:
    words = ["model=mlp", "model.width=16", "model.depth=1", "loop.log_every=null", "loop.global_batch=120"]
    words += ["loop.eval_every=1", "schedule=constant"]
    more = ["ema.decay=0.5", "checkpoint.best=-ema_loss", "checkpoint.keep=9", "loop.steps=4", "seed=1"]
    old = run([*words, *more, "run.dir=old"], place=tmp_path)
    # this run looks for another figure; the old one's counts
    new = run([*words, "loop.steps=1", "init_from=old", *STILL, "run.dir=new"], place=tmp_path)
    best = min(old.lines("eval"), key=lambda line: line["ema_loss"])
    said = f"step-{best['step']:08d} (best ema_loss: {best['ema_loss']:.4f}); of the moving average"
    assert said in log_of(new.folder)
    assert new.lines("eval")[0]["loss"] == pytest.approx(best["ema_loss"], rel=1e-6)
    files = (old.folder / "checkpoints" / f"step-{best['step']:08d}").glob("*.safetensors")
    kept = {name: one for file in files for name, one in load_file(file).items() if name.startswith("ema/")}
    assert equal({f"ema/{name}": one for name, one in saved(new.folder).items()}, kept)
