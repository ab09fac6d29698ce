"""Optimizers of users' own: what they remember is saved, and the schedule reaches them; else they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.commands import curve, far, lines
from tests.inside import here, product
from tests.processes import Processes
from trainer.learning.optimizer_checks import refuse_coupled_steps, refuse_unusable_optimizer
from trainer.messages import Refusal


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as people write it."""

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})
        every = [p for group in self.param_groups for p in group["params"]]
        self.muon = torch.optim.Muon([p for p in every if p.ndim == 2], lr=lr, weight_decay=weight_decay)
        self.adamw = torch.optim.AdamW([p for p in every if p.ndim != 2], lr=lr / 10, weight_decay=weight_decay)

    def step(self, closure: Any = None) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


class Hidden(torch.optim.Optimizer):
    """Its momentum lies where nobody looks."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.memory: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.memory[p] = 0.9 * self.memory.get(p, 0.0) + p.grad
                    p -= group["lr"] * self.memory[p]


class Listed(Hidden):
    """It keeps its last gradients as a list, or something else that is neither a tensor nor a number."""

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "list") -> None:
        super().__init__(params, lr)
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                self.state[p]["last"] = {"list": [p.grad], "dict": {"of": p.grad}, "tuple": (1, 2), "str": "a word"}[
                    self.kind
                ]
                p -= group["lr"] * p.grad


class Deaf(Hidden):
    """Its rate is its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.rate = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p -= self.rate * p.grad


class Coupled(torch.optim.Optimizer):
    """One rate for all, from the norm of all gradients; its group keeps it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "estimate": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([p.grad.square().sum() for p in every]).sum().sqrt()) if every else 0.0
        for group in self.param_groups:
            group["estimate"] = max(group["estimate"], norm)
        for p in every:
            p -= self.param_groups[0]["lr"] / (1 + self.param_groups[0]["estimate"]) * p.grad


class Rows(torch.optim.SGD):
    """It would step rows by their norms, of which a shard knows less."""

    whole_matrices = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)


class ScheduleFree(torch.optim.Optimizer):
    """SGD that evaluates a mean of the weights it has had, as the package has it: made for an evaluation."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "training": False, "k": 0})

    def train(self) -> None:
        self._swap(True, 1 - 0.9)

    def eval(self) -> None:
        self._swap(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def _swap(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["training"] != training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise Exception("not in train mode")
            group["k"] += 1
            for p in (each for each in group["params"] if each.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).sub_(p.grad, alpha=group["lr"] * (1 - 0.9 * (1 - 1 / group["k"])))
                z.sub_(p.grad, alpha=group["lr"])


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small run with these classes as options of `optimizer`."""
    for kind in (Both, Hidden, Listed, Deaf, Coupled, Rows, ScheduleFree):
        option = tmp_path / "conf" / "optimizer" / f"{kind.__name__.lower()}.yaml"
        option.parent.mkdir(parents=True, exist_ok=True)
        option.write_text(f"_target_: tests.test_optimizer_checks.{kind.__name__}\nlr: 0.02\n")
    monkeypatch.chdir(tmp_path)
    brief = ["trust=[tests]", "loop.log_every=1", "loop.global_batch=24", "loop.eval_every=null", "model.width=16"]
    return ["--config-dir", "conf", *brief, "model=mlp", "model.depth=1", "loop.epochs=null"]


def _losses(run: str, kind: str = "train") -> list[float]:
    return [line["loss"] for line in lines(Path(run), kind)]


def test_muon_and_adamw_in_one_class_train_are_saved_and_scheduled(words: list[str]) -> None:
    words = [*words, "optimizer=both", "loop.steps=4"]
    assert here(*words, "run.dir=whole", "loop.save_every=2") == 0
    (kept,) = Path("whole/checkpoints").glob("*4/")
    names = {name for file in kept.glob("*.safetensors") for name in load_file(file) if name.startswith("optimizer/")}
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"} == {name.rsplit("/")[-1] for name in names}
    # a run that goes on from the middle is the same one
    assert here(*words, "run.dir=again", "run.resume=whole/checkpoints/step-00000002") == 0
    assert _losses("again") == curve(Path("whole"))[2:]
    # and a schedule is heard
    assert here(*words, "run.dir=other", "schedule=constant") == 0
    assert curve(Path("other"))[1:] != curve(Path("whole"))[1:]
    assert (
        here(
            *words,
            "run.dir=torch",
            "schedule=torch",
            "schedule._target_=torch.optim.lr_scheduler.StepLR",
            "+schedule.step_size=1",
        )
        == 0
    )


def test_an_optimizer_with_a_memory_of_its_own_is_refused(words: list[str]) -> None:
    with pytest.raises(Refusal, match="Hidden remembers something outside of its state, which no checkpoint"):
        here(*words, "optimizer=hidden", "run.dir=run")
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "str"])
def test_an_optimizer_that_keeps_more_than_tensors_and_numbers_is_refused(words: list[str], kind: str) -> None:
    with pytest.raises(
        Refusal, match=f"Listed keeps 'last' as {kind}, and a checkpoint holds tensors and numbers; let"
    ):
        here(*words, "optimizer=listed", f"+optimizer.kind={kind}", "run.dir=run")
    assert not Path("run").exists()


def test_an_optimizer_with_a_rate_of_its_own_is_refused(words: list[str]) -> None:
    with pytest.raises(Refusal, match=r"Deaf steps .* by a rate of its own, not by the lr of its param_groups"):
        here(*words, "optimizer=deaf", "run.dir=run")


def test_an_optimizer_that_couples_parameters_keeps_its_group_and_needs_all_of_them(
    processes: Processes, words: list[str]
) -> None:
    words = [*words, "optimizer=coupled", "loop.steps=4", "precision=fp64"]
    assert here(*words, "run.dir=whole", "loop.save_every=2") == 0
    # its number is in the checkpoint: without it the estimate would begin anew, at a smaller gradient
    assert here(*words, "run.dir=again", "run.resume=whole/checkpoints/step-00000002") == 0
    assert _losses("again") == curve(Path("whole"))[2:]
    with pytest.raises(
        AssertionError, match="Refusal: optimizer: Coupled steps a parameter by what it knows of all others"
    ):
        processes.run(2, product, Path.cwd(), [*words, "run.dir=other", "strategy=zero1"])


def test_an_optimizer_of_whole_matrices_is_refused_where_ranks_hold_shards(
    processes: Processes, words: list[str]
) -> None:
    words = [*words, "optimizer=rows", "loop.steps=1"]
    with pytest.raises(AssertionError, match="Refusal: strategy=fsdp: Rows computes with whole matrices"):
        processes.run(2, product, Path.cwd(), [*words, "run.dir=shards", "strategy=fsdp"])
    assert processes.run(2, product, Path.cwd(), [*words, "run.dir=whole", "strategy=zero1"]) == [0, 0]


def test_a_schedule_free_optimizer_evaluates_and_saves_its_mean(processes: Processes, words: list[str]) -> None:
    words = [*words, "optimizer=schedulefree", "loop.steps=6", "precision=fp64", "loop.save_every=3"]
    assert here(*words, "run.dir=whole", "loop.eval_every=2") == 0
    # an evaluation, which swaps the weights and back, changes a step's rounding alone
    for strategy in ("zero1", "fsdp"):
        divided = [*words, f"run.dir={strategy}", "loop.eval_every=2", f"strategy={strategy}"]
        assert processes.run(2, product, Path.cwd(), divided) == [0, 0]
        assert far(curve(Path(strategy)), curve(Path("whole"))) < 1e-12
        assert far(_losses(strategy, "eval"), _losses("whole", "eval")) < 1e-12
        # from its checkpoint one process goes on
        assert here(*words, f"run.dir=from-{strategy}", f"run.resume={strategy}/checkpoints/step-00000003") == 0
        assert far(_losses(f"from-{strategy}"), curve(Path("whole"))[3:]) < 1e-12
    assert here(*words, "run.dir=again", "loop.eval_every=2", "run.resume=whole/checkpoints/step-00000003") == 0
    assert _losses("again") == curve(Path("whole"))[3:]


KNOWN = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "Adagrad",
    "Adafactor",
    "ASGD",
    "RMSprop",
    "Rprop",
]


@pytest.mark.parametrize("name", KNOWN)
def test_those_of_torch_pass(words: list[str], name: str) -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(2, 2))
    kind = getattr(torch.optim, name)
    refuse_unusable_optimizer(network, lambda groups: kind(groups, lr=0.01))
    refuse_coupled_steps(network, lambda groups: kind(groups, lr=0.01), "zero1")
