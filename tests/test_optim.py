"""Optimizers as runs use them: torch's, step by step as a loop by hand has them, and users' own, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.options import options
from tests.ranks import Processes
from tests.run import Finished, far, quickly, run
from tests.test_initial_weights import everything, saved
from trainer import Data, Task


class Table(nn.Module):
    """Pixels as rows of a table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4, sparse=True), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x * 4 + 8).long().clamp(0, 19)).flatten(1))


class Kinds(nn.Module):
    """Parameters of every kind: matrices, vectors, a number, what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.number = nn.LayerNorm(64), nn.Linear(64, 10), nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.number * self.head(self.norm(self.frozen(x.flatten(1))))


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as people write it."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        every = [p for group in self.param_groups for p in group["params"]]
        self.muon = torch.optim.Muon([p for p in every if p.ndim == 2], lr=lr)
        self.adamw = torch.optim.AdamW([p for p in every if p.ndim != 2], lr=lr / 10)

    def step(self, closure: Any = None) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


class Own(torch.optim.Optimizer):
    """SGD with something wrong: its memory is hidden, or no tensor; its rate is its own."""

    def __init__(self, params: Any, lr: float = 0.02, wrong: str = "hidden") -> None:
        super().__init__(params, {"lr": lr})
        self.rate, self.wrong, self.memory = lr, wrong, dict[Tensor, Tensor]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                if self.wrong == "list":
                    self.state[p]["last"] = [p.grad]
                if self.wrong == "hidden":
                    self.memory[p] = 0.9 * self.memory.get(p, 0.0) + p.grad
                step = self.memory.get(p, p.grad)
                p -= (self.rate if self.wrong == "deaf" else group["lr"]) * step


class Loose(torch.optim.SGD):
    """Without annotations, as many write them: nothing but the value tells that a rate is no number."""

    def __init__(self, params, lr=1e-3) -> None:
        super().__init__(params, lr=lr)


class ScheduleFree(torch.optim.Optimizer):
    """SGD that evaluates a mean of the weights it has had, as the package has it: made for an evaluation."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
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


SGD = ["optimizer=sgd", "optimizer.nesterov=false", "optimizer.weight_decay=0"]
MLP = ["model=mlp", "model.width=16", "model.depth=1"]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Finished]:
    """Short runs of these networks and optimizers."""
    own = options(tmp_path, Table, Kinds, Both, Own, Loose, ScheduleFree, One, Entropy)
    own += ["loop.log_every=1", "loop.global_batch=24", "loop.eval_every=null", "schedule=constant"]

    def train(name: str, *words: str, ranks: int = 1, code: int = 0) -> Finished:
        how: Any = "here" if ranks == 1 else "group"
        return run([*own, f"run.dir={name}", *words], ranks, how, place=tmp_path, code=code)

    return train


def told(done: Finished, kind: str = "train") -> list[float]:
    return [line["loss"] for line in done.lines(kind)]


ADAGRAD = ["optimizer=adam", "optimizer._target_=torch.optim.Adagrad", "~optimizer.betas"]


class One(Data):
    """The same batch in each step."""

    def train(self) -> Any:
        x = torch.randn(24, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return TensorDataset(x, x[:, :10].argmax(1))

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        return torch.arange(24)

    def evaluation(self) -> Any:
        return None


class Entropy(Task):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)


DECAY = "optimizer.weight_decay=0.1"
BY_HAND: list[tuple[list[str], str, dict[str, Any]]] = [
    ([*SGD[:2], DECAY], "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ([*SGD[:2], DECAY, "optimizer.decay=all"], "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ([*SGD, "+optimizer.dampening=0.5"], "SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0}),
    (["optimizer=adamw", DECAY], "AdamW", {"weight_decay": 0.1}),
    (["optimizer=adam", "+optimizer.amsgrad=true", DECAY], "Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ([*ADAGRAD, DECAY], "Adagrad", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("max_norm", [None, 0.3, 1000.0])
@pytest.mark.parametrize(("words", "kind", "own"), quickly(BY_HAND, *BY_HAND[1:4]))
def test_a_run_clips_decays_and_steps_as_a_loop_by_hand(
    train: Any, words: list[str], kind: str, own: dict[str, Any], max_norm: float | None
) -> None:
    """A limit above every norm changes nothing; vectors and numbers do not decay unless all are named."""
    given = ["model=kinds", "data=one", "task=entropy", "precision=fp64", "loop.steps=4", *words]
    begun = saved(train("begun", *given, "loop.steps=1", "optimizer.lr=0").folder)
    done = train("run", *given, "optimizer.lr=0.01", f"loop.max_norm={'null' if max_norm is None else max_norm}")
    network, (x, y) = Kinds().double(), One().train().tensors
    network.load_state_dict(begun)
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    spared = [p for p in learning if p.dim() < 2 and "optimizer.decay=all" not in words]
    groups = [{"params": [p for p in learning if not any(p is one for one in spared)]}]
    groups += [{"params": spared, "weight_decay": 0.0}]  # type: ignore[dict-item]
    optimizer = getattr(torch.optim, kind)([group for group in groups if group["params"]], lr=0.01, **own)
    norms = []
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(network(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(learning, max_norm or math.inf)))
        optimizer.step()
    assert min(norms) > 0.3
    assert done.curve("grad_norm") == pytest.approx(norms, rel=1e-6)
    torch.testing.assert_close(saved(done.folder), dict(network.state_dict()), rtol=1e-6, atol=1e-9)


def test_sparse_gradients_train_alone_and_under_ddp(processes: Processes, train: Any) -> None:
    words = ["model=table", *SGD, "loop.steps=6", "loop.max_norm=1"]
    alone = told(train("alone", *words))
    assert told(train("two", *words, "strategy=ddp", "loop.micro_batches=2", ranks=2)) == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < alone[0]


# Users' own.


def test_muon_and_adamw_in_one_class_train_are_saved_and_scheduled(train: Any) -> None:
    words = [*MLP, "optimizer=both", "loop.steps=4", "schedule=cosine"]
    whole = train("whole", *words, "loop.save_every=2")
    kept = {name.rsplit("/")[-1] for name in everything(whole.folder) if name.startswith("optimizer/")}
    assert kept == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    # a run that goes on from the middle is the same one
    assert told(train("again", *words, "run.resume=whole/checkpoints/step-00000002")) == told(whole)[2:]
    # and a schedule is heard, also one of torch's
    assert told(train("other", *words, "schedule=constant"))[1:] != told(whole)[1:]
    step = ["schedule=torch", "schedule._target_=torch.optim.lr_scheduler.StepLR", "+schedule.step_size=1"]
    assert told(train("torch", *words, *step))[1:] != told(whole)[1:]


def test_a_schedule_free_optimizer_evaluates_and_saves_its_mean(processes: Processes, train: Any) -> None:
    words = [*MLP, "optimizer=schedulefree", "loop.steps=6", "precision=fp64", "loop.save_every=3", "loop.eval_every=2"]
    whole = train("whole", *words)
    # an evaluation, which swaps the weights and back, changes a step's rounding alone
    for strategy in ("zero1", "fsdp"):
        divided = train(strategy, *words, f"strategy={strategy}", ranks=2)
        assert far(told(divided), told(whole)) < 1e-12
        assert far(told(divided, "eval"), told(whole, "eval")) < 1e-12
        # from its checkpoint one process goes on
        again = train(f"from-{strategy}", *words, f"run.resume={strategy}/checkpoints/step-00000003")
        assert far(told(again), told(whole)[3:]) < 1e-12


OWN = ["optimizer=own", *MLP]
REFUSED: list[tuple[list[str], str]] = [
    (["model=table"], "AdamW says: Adam does not support sparse gradients"),
    (["model=table", "optimizer=sgd"], "the embedding table makes sparse gradients, and SGD says"),
    ([*MLP, *SGD, "optimizer.fused=true", "+optimizer.dampening=0.5"], "leave optimizer.fused out"),
    ([*MLP, *ADAGRAD[:1], "optimizer._target_=torch.optim.Rprop", "~optimizer.betas", "~optimizer.weight_decay",
      "optimizer.fused=true"], "Rprop has no fused step"),
    ([*MLP, "optimizer=loose", "optimizer.lr=fast"], "optimizer.lr=fast: expected a number"),
    ([*MLP, "optimizer=loose", "optimizer.lr=null", "schedule=plateau"], "optimizer.lr=null: expected a number"),
    (OWN, "Own remembers something outside of its state, which no checkpoint"),
    ([*OWN, "optimizer.wrong=deaf"], "by a rate of its own, not by the lr of its param_groups"),
    ([*OWN, "optimizer.wrong=list"], "Own keeps 'last' as list, and a checkpoint holds tensors and"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda one: " ".join(one) if isinstance(one, list) else "")
def test_an_optimizer_that_cannot_train_or_be_saved_is_refused(
    train: Any, tmp_path: Path, words: list[str], said: str
) -> None:
    assert said in train("no", *words, "loop.steps=1", code=2).out
    assert not (tmp_path / "no").exists()
