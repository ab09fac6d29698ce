"""The loop: when things happen, and that nothing in a step waits for the device."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.vision.classification import Classification
from tests.strategies.toys import BATCH, CLASSES, Net, Plain, ToyData, Weighted
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.learning import intervals
from trainer.learning.intervals import Interval, Trigger
from trainer.learning.schedule import Constant, Cosine, Linear, Schedule
from trainer.learning.task import Task
from trainer.loop import train_metrics
from trainer.loop import trainer as trainer_module
from trainer.loop.evaluation import trial_evaluation
from trainer.loop.progress import Progress
from trainer.loop.trainer import Trainer
from trainer.messages import Refusal
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.metrics_files import MetricsFile
from trainer.records.sinks import Log
from trainer.strategies.machine import Machine
from trainer.strategies.single import Single


@dataclass
class Stop:
    raised: bool = False

    def __call__(self) -> bool:
        return self.raised


@dataclass
class Made:
    """A trainer and what it wrote."""

    trainer: Trainer
    folder: Path
    states: list[tuple[str, int]] = field(default_factory=list)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        text = (self.folder / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

    def saved(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in (self.folder / "checkpoints").glob("step-*"))


@contextmanager
def made(folder: Path, task: Task | None = None, device: str = "cpu", keep: int = 99, **changes: Any) -> Iterator[Made]:
    torch.manual_seed(0)
    task, data = task or Plain(), ToyData()
    log = Log([MetricsFile()])
    log.open(folder, 0, None, None)
    with Single(machine=Machine(launch=Launch(), device=device, precision="fp32")) as strategy:
        micro_batches = changes.pop("micro_batches", 1)
        stream = TrainLoader(data, data.train(), strategy.slice, BATCH, micro_batches, LoaderOptions())
        parallel_model = strategy.build(task, Net(), stream.example())
        optimizer = torch.optim.AdamW(parallel_model.network.parameters(), lr=changes.pop("lr", 0.01), fused=True)
        states: list[tuple[str, int]] = []
        steps = changes.pop("steps", 10)
        words: dict[str, Any] = {
            "eval_loader": EvalLoader(data, data.evaluation(), strategy.slice, 50, micro_batches, LoaderOptions()),
            "stop": Stop(),
            "steps": steps,
            "horizon": steps,
            "max_norm": None,
            "log_trigger": Trigger([Interval(steps=3)]),
            "eval_trigger": Trigger([Interval(epochs=1)]),
            "save_trigger": Trigger([Interval(steps=5)]),
            **changes,
        }
        yield Made(
            Trainer(
                strategy=strategy,
                model=parallel_model,
                task=task,
                optimizer=optimizer,
                schedule=words.pop("schedule", Cosine()),
                train_loader=stream,
                checkpoints=CheckpointManager(folder / "checkpoints", strategy.world, keep, words.pop("best", "-loss")),
                log=log,
                report=lambda state, step: states.append((state, step)),
                progress=Progress(),
                **words,
            ),
            folder,
            states,
        )
    log.close()


def listen(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, hear: Any) -> None:
    """Have every call of a function heard before it happens."""
    function = getattr(owner, name)

    def heard(*args: Any) -> Any:
        hear(*args)
        return function(*args)

    monkeypatch.setattr(owner, name, heard)


def test_rhythms_and_the_last_step(tmp_path: Path) -> None:
    with made(
        tmp_path, best="macro", log_trigger=Trigger([Interval(steps=4), Interval(steps=6)])
    ) as run:  # an epoch has 4 steps
        assert run.trainer.fit(None)
    assert [(line["step"], line["epoch"]) for line in run.lines("train")] == [(4, 0), (6, 1), (8, 1), (10, 2)]
    assert [(line["step"], line["epoch"]) for line in run.lines("eval")] == [(4, 0), (8, 1), (10, 2)]
    assert {5, 10} <= set(run.saved())
    assert all(line["samples"] == 101 for line in run.lines("eval"))


def test_the_first_of_several_rhythms_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(intervals, "monotonic", lambda: now[0])
    due = Trigger([Interval(steps=4), Interval(epochs=2), Interval(seconds=9.0), Interval(seconds=5.0)])
    epochs = {step: step // 3 for step in (3, 6, 9)}
    assert [step for step in range(1, 10) if due.is_due(step, epochs.get(step), clock_expired=False)] == [4, 6, 8]
    assert not due.clock_expired()
    now[0] = 5.0
    assert due.clock_expired()


def test_a_training_line_says_what_the_contract_says(tmp_path: Path) -> None:
    with made(tmp_path, steps=6) as run:
        run.trainer.fit(None)
    keys = "kind step epoch loss loss_mean loss_hex lr grad_norm samples samples_per_s step_s time sample_digest"
    for line in run.lines("train"):
        assert set(line) == set(keys.split())
        bits = torch.tensor(line["loss"], dtype=torch.float32).view(torch.int32)
        assert int(bits) & 0xFFFFFFFF == int(line["loss_hex"], 16)
        assert line["samples"] == line["step"] * BATCH
    assert run.lines("train")[0]["loss_mean"] != run.lines("train")[0]["loss"]


def test_a_lines_mean_is_over_the_steps_since_the_last(tmp_path: Path) -> None:
    lines = []
    for steps in (1, 4):
        with made(tmp_path / str(steps), log_trigger=Trigger([Interval(steps=steps)])) as run:
            run.trainer.fit(None)
        lines.append(run.lines("train"))
    each = [line["loss"] for line in lines[0]]
    assert [line["loss"] for line in lines[1]] == [each[3], each[7], each[9]]
    means = [sum(part) / len(part) for part in (each[:4], each[4:8], each[8:])]
    assert [line["loss_mean"] for line in lines[1]] == pytest.approx(means, rel=1e-12)


def test_every_group_has_its_rate_times_the_schedule(tmp_path: Path) -> None:
    schedule, seen = Linear(warmup=2, final=0.1), []
    with made(tmp_path, schedule=schedule, steps=6, horizon=9, log_trigger=Trigger([Interval(steps=1)])) as run:
        (group,) = (optimizer := run.trainer.optimizer).param_groups
        optimizer.param_groups[:] = [{**group, "params": group["params"][:2]}, {**group, "params": [], "lr": 0.002}]
        optimizer.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
        run.trainer.fit(None)
    factors = [schedule(step, 0, 9) for step in range(6)]
    assert seen == [[0.01 * factor, 0.002 * factor] for factor in factors]
    assert [line["lr"] for line in run.lines("train")] == [first for first, _ in seen]


@pytest.mark.parametrize(
    ("max_norm", "limits"), [(None, [None, None, inf, None, inf]), (0.5, [0.5] * 5)], ids=["measured", "clipped"]
)
def test_the_norm_is_taken_to_clip_by_and_else_for_lines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_norm: float | None, limits: list[float | None]
) -> None:
    given = []
    with made(tmp_path, steps=5, max_norm=max_norm) as run:
        listen(monkeypatch, run.trainer.model, "optimizer_step", lambda _, limit: given.append(limit))
        run.trainer.fit(None)
    assert given == limits


def test_what_is_due_after_a_step_comes_in_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are there before what follows them, so that a resumed run drops some and invents none."""
    told: list[str] = []

    def tell(owner: Any, *names: str) -> None:
        for name in names:
            listen(monkeypatch, owner, name, lambda *_, name=name: told.append(name))

    rhythms: dict[str, Any] = {
        "log_trigger": Trigger([Interval(steps=1)]),
        "save_trigger": Trigger([Interval(steps=2)]),
    }
    with made(tmp_path, steps=3, best="macro", **rhythms) as run:
        trainer = run.trainer
        trainer.begin(None)
        tell(trainer.model, "forward_backward", "optimizer_step", "after_step", "settle", "unsettle", "state")
        tell(trainer.log, "train", "eval", "flush")
        tell(trainer.checkpoints, "save")
        monkeypatch.setattr(trainer_module, "evaluate", lambda *_: {"macro": 1.0})
        tell(trainer_module, "evaluate")
        monkeypatch.setattr(trainer, "begin", lambda start: None)
        trainer.fit(None)
    saved, learned = ["settle", "state", "flush", "save", "unsettle"], ["optimizer_step", "after_step"]
    assert told == [
        *("forward_backward", *learned),
        *("forward_backward", "train", *learned, "train", *saved),  # a line is read while the next step computes
        *("forward_backward", *learned, "train", "settle", "evaluate", "eval", "unsettle", *saved),
    ]
    assert run.states == [("running", step) for step in (1, 2, 2, 3, 3)]
    assert [json.loads(path.read_text())["figures"] for path in sorted(run.folder.rglob("manifest.json"))] == [
        {},
        {"macro": 1.0},
    ]


def test_the_network_is_as_steps_want_it_after_what_was_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def count(run: Made) -> None:
        for name in ("settle", "unsettle", "state"):
            listen(monkeypatch, run.trainer.model, name, lambda *_, name=name: told.append(name))

    with made(tmp_path / "stopped", steps=4, save_trigger=Trigger([])) as run:
        count(run)
        listen(monkeypatch, trainer_module, "evaluate", lambda *_: setattr(run.trainer.stop, "raised", True))
        assert not run.trainer.fit(None)
    assert told == ["settle", "unsettle", "settle", "state", "unsettle"]  # the evaluation, and the save that follows


def test_a_new_best_is_kept_at_once(tmp_path: Path) -> None:
    with made(tmp_path, best="macro", save_trigger=Trigger([]), keep=1) as run:
        run.trainer.fit(None)
    best = max(run.lines("eval"), key=lambda line: line["macro"])
    assert set(run.saved()) == {best["step"], 10}


def test_a_clock_that_has_run_out_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(intervals, "monotonic", lambda: now[0])

    class Second(Constant):
        def __call__(self, step: int, epoch: int, horizon: int) -> float:
            now[0] += 1.0  # every step takes one
            return 1.0

    rhythms: dict[str, Any] = {
        key: Trigger([Interval(seconds=3.0)]) for key in ("log_trigger", "eval_trigger", "save_trigger")
    }
    with made(tmp_path, schedule=Second(), best="macro", **rhythms) as run:
        run.trainer.fit(None)
    assert [line["step"] for line in run.lines("train")] == [4, 8, 10]
    assert [line["step"] for line in run.lines("eval")] == [3, 6, 9, 10]
    best = [line["step"] for line in run.lines("eval")]
    assert set(run.saved()) - set(best) == set()


def test_the_time_of_a_step_is_that_of_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(train_metrics, "perf_counter", lambda: now[0])
    # what is no step falls into the middle of lines; the first evaluation's figures stay the best
    with made(
        tmp_path, lr=0.0, eval_trigger=Trigger([Interval(steps=4)]), save_trigger=Trigger([Interval(steps=7)])
    ) as run:
        for owner, name, seconds in (
            (run.trainer.model, "forward_backward", 2.0),
            (run.trainer.model, "evaluate", 30.0),
            (run.trainer.checkpoints, "save", 500.0),
        ):
            listen(monkeypatch, owner, name, lambda *_, seconds=seconds: now.append(now.pop() + seconds))
        run.trainer.fit(None)
    lines = run.lines("train")
    assert [(line["step"], line["step_s"], line["samples_per_s"]) for line in lines] == [
        (step, 2.0, BATCH / 2.0) for step in (3, 6, 9, 10)
    ]


def test_the_first_inputs_are_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    with made(tmp_path, steps=3, micro_batches=2) as run:
        monkeypatch.setattr(run.trainer.media, "log_inputs", lambda batch: shown.append(len(batch.inputs)))
        run.trainer.fit(None)
    assert shown == [BATCH // 2]


def test_a_task_hears_of_every_step_and_sees_the_network_in_its_mode(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watching(Plain):
        def forward(self, network: Any, inputs: Any, targets: Any) -> Any:
            seen.append(network.training)
            return super().forward(network, inputs, targets)

        def after_step(self, network: Any, step: int) -> None:
            assert not torch.is_grad_enabled()  # what it changes in place is not learned through
            seen.append(step)

    with made(tmp_path, Watching(), steps=5, best="macro") as run:
        run.trainer.begin(None)
        seen.clear()  # of the rehearsal
        run.trainer.fit(None)
    evaluation = [False] * 3  # batches of 50 of 101 samples
    training = [item for step in range(1, 6) for item in (True, step, *(evaluation if step in (4, 5) else ()))]
    assert seen == [*[False] * 3, *training]  # a rehearsal first, and a look at what metrics make of one sample


def test_a_request_to_stop_finishes_the_step_and_saves(tmp_path: Path) -> None:
    class AtOnce(Schedule):
        def __call__(self, step: int, epoch: int, horizon: int) -> float:
            run.trainer.stop = lambda: step == 6
            return 1.0

        def at(self, step: int, epoch: int, done: float) -> float:
            return 1.0

    with made(tmp_path, schedule=AtOnce(), save_trigger=Trigger([])) as run:
        assert not run.trainer.fit(None)
    assert run.saved()[-1] == 7
    assert run.trainer.progress == Progress(step=7, epoch=1, position=3 * BATCH, samples=7 * BATCH)


def test_stopped_and_gone_on_with_it_is_the_run_that_nothing_happened_to(tmp_path: Path) -> None:
    def words(stop: Stop, **more: Any) -> dict[str, Any]:
        return {"stop": stop, "log_trigger": Trigger([Interval(steps=1)]), "checkpoint_facts": {"note": "kept"}, **more}

    def weights(run: Made) -> dict[str, list[float]]:
        return {name: value.flatten().tolist() for name, value in run.trainer.model.network.state_dict().items()}

    with made(tmp_path / "whole", **words(Stop())) as whole:
        assert whole.trainer.fit(None)
        expected = weights(whole)
    with made(tmp_path / "stopped", **words(Stop(raised=True))) as stopped:
        assert not stopped.trainer.fit(None)
        stopped.trainer.stop.raised = False  # type: ignore[attr-defined]
        stopped.trainer.steps = 7
        assert stopped.trainer.fit(stopped.trainer.checkpoints.newest())
        found = stopped.trainer.checkpoints.newest()
    assert found is not None
    assert found.state == {
        "progress": asdict(Progress(step=7, epoch=1, position=3 * BATCH, samples=7 * BATCH, stale=1)),
        "schedule": {},
        "horizon": 10,
        "note": "kept",
    }
    with made(tmp_path / "again", **words(Stop())) as again:
        torch.nn.init.zeros_(again.trainer.model.network.get_parameter("head.weight"))  # what is read counts
        assert again.trainer.fit(found)
        assert weights(again) == expected
    told = [(line["step"], line["epoch"], line["loss_hex"], line["samples"]) for line in whole.lines("train")]
    assert told[7:] == [
        (line["step"], line["epoch"], line["loss_hex"], line["samples"]) for line in again.lines("train")
    ]


def test_time_that_has_run_out_stops_as_if_asked(tmp_path: Path) -> None:
    with made(tmp_path, stop_after=0.0) as run:
        assert not run.trainer.fit(None)
    assert run.saved() == [1]


def test_a_clock_makes_things_due(tmp_path: Path) -> None:
    with made(
        tmp_path, save_trigger=Trigger([Interval(seconds=0.0)]), log_trigger=Trigger([Interval(seconds=0.0)])
    ) as run:
        run.trainer.fit(None)
    assert run.saved() == list(range(1, 11))
    assert [line["step"] for line in run.lines("train")] == [2, 4, 6, 8, 10]  # the clock is asked a step before


def test_a_loss_that_is_no_number_stops_the_run_and_is_not_saved(tmp_path: Path) -> None:
    with made(tmp_path, lr=float("inf")) as run, pytest.raises(FloatingPointError, match="loss"):
        run.trainer.fit(None)
    assert run.saved() == []


class Bad(Plain):
    """The loss of one step is no number; the weights are not harmed by it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return super().loss(output, target) + (math.nan if self.step == 1 else 0.0)

    def after_step(self, network: Any, step: int) -> None:
        self.step -= 1


@pytest.mark.parametrize(
    ("at", "due", "read"),
    [
        # in the step after it, also where there is no line
        (2, {"log_trigger": Trigger([]), "save_trigger": Trigger([])}, 3),
        # before a save of the same step
        (4, {"log_trigger": Trigger([]), "save_trigger": Trigger([Interval(steps=4)])}, 4),
    ],
)
def test_one_loss_that_is_no_number_is_found_in_the_next_step(tmp_path: Path, at: int, due: Any, read: int) -> None:
    due = {**due, "eval_trigger": Trigger([])}
    with (
        made(tmp_path, Bad(at), **due) as run,
        pytest.raises(FloatingPointError, match=f"^step {at}: the loss is nan"),
    ):
        run.trainer.fit(None)
    assert run.trainer.progress.step == read
    assert run.saved() == []


def test_a_best_figure_that_the_task_does_not_have_is_refused(tmp_path: Path) -> None:
    with (
        made(tmp_path, best="makro") as run,
        pytest.raises(Refusal, match="-loss, -perplexity, macro; did you mean 'macro'"),
    ):
        run.trainer.fit(None)


class Terse(Weighted):
    """Says one figure, as a tensor, and not the loss."""

    def finish(self, totals: dict[str, Tensor]) -> Any:
        return {"right": totals["correct"] / totals["samples"]}


class Nothing(Terse):
    """No sample counts."""

    def weight(self, target: Any) -> Tensor:
        return 0 * super().weight(target)


def test_an_evaluation_line_always_has_the_mean_loss(tmp_path: Path) -> None:
    losses: dict[type[Task], list[float]] = {}
    for kind in (Weighted, Terse, Nothing):
        with made(tmp_path / kind.__name__, kind(), lr=0.0, steps=4) as run:
            run.trainer.fit(None)
        losses[kind] = [line["loss"] for line in run.lines("eval")]
        assert kind is Weighted or set(run.lines("eval")[0]) == {"kind", "step", "epoch", "samples", "loss", "right"}
    assert losses[Terse] == losses[Weighted]  # whose own figure is that
    assert losses[Nothing] == [0.0]


@pytest.mark.parametrize(("position", "left"), [(220 - 2 * BATCH, 2), (220 - BATCH, 1), (200, 4)])
def test_a_place_from_which_no_whole_batch_is_left_goes_on_with_the_next_epoch(
    tmp_path: Path, position: int, left: int
) -> None:
    with made(tmp_path, steps=3) as run:
        run.trainer.fit(None)
        found = run.trainer.checkpoints.newest()
    assert found is not None
    found.state["progress"]["position"] = position  # of 220; as after a run with another global batch
    with made(tmp_path / "again", steps=3 + left) as run:  # to the end of an epoch
        assert run.trainer.fit(found)
    assert (run.trainer.progress.epoch, run.trainer.progress.position) == (2 if left == 4 else 1, 0)


def test_momentum_that_a_checkpoint_does_not_bring_begins(tmp_path: Path) -> None:
    def sgd(run: Made, momentum: float) -> torch.optim.Optimizer:
        parameters = run.trainer.model.network.parameters()
        run.trainer.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum, fused=True)
        return run.trainer.optimizer

    with made(tmp_path / "without", steps=1) as run:
        sgd(run, 0.0)
        run.trainer.fit(None)
        found = run.trainer.checkpoints.newest()
    with made(tmp_path / "with", steps=2) as run:
        optimizer = sgd(run, 0.9)
        run.trainer.begin(found)
    assert [list(memory) for memory in optimizer.state.values()] == [["momentum_buffer"]] * 8


class Broken(Plain):
    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        raise KeyError("a mistake in the metrics")


def test_a_fault_in_the_evaluation_shows_before_the_first_step(tmp_path: Path) -> None:
    with made(tmp_path, Broken()) as run, pytest.raises(KeyError, match="a mistake in the metrics"):
        run.trainer.fit(None)
    assert run.trainer.progress.step == 0


def test_an_evaluation_that_loses_samples_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(tmp_path) as run:
        whole = run.trainer.model.evaluate
        monkeypatch.setattr(run.trainer.model, "evaluate", lambda batch, valid: whole(batch, valid - 1 and valid))
        with pytest.raises(RuntimeError, match="evaluated 100 samples of a set of 101"):
            run.trainer.fit(None)


class Waiting(TorchDispatchMode):
    """Notes every operation that would make the host wait for a GPU: those that read a number out of a tensor.

    `also`: others, by name. `torch.tensor(3)` is a lift_fresh; with device="cuda" it copies from the host, and waits.
    """

    def __init__(self, *also: str) -> None:
        super().__init__()
        self.waits = ("_local_scalar_dense", "item", "nonzero", *also)
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.waits:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_in_a_step_waits_for_the_device(tmp_path: Path, max_norm: float | None, micro_batches: int) -> None:
    with made(tmp_path, max_norm=max_norm, micro_batches=micro_batches, steps=40, log_trigger=Trigger([])) as run:
        trainer = run.trainer
        trainer.begin(None)
        batches = [batches for epoch in (0, 1) for batches in trainer.train_loader.epoch(epoch)]
        trainer.train_step(batches[0])
        with Waiting() as waiting:
            for step in batches[1:3]:
                trainer.train_step(step)
        assert waiting.seen == []
        with Waiting("lift_fresh") as waiting:
            torch.ones(1).item(), torch.tensor(3)
        assert len(waiting.seen) == 2  # the watch itself works


def test_a_step_that_may_be_left_out_does_not_wait_either(tmp_path: Path) -> None:
    with made(tmp_path, micro_batches=2) as run:
        parallel_model, optimizer = run.trainer.model, run.trainer.optimizer
        parallel_model.skip_broken_steps()
        parallel_model.before_first_step = False  # there a loss is looked at more closely
        batches = next(iter(run.trainer.train_loader.epoch(0)))
        for also in ([], ["lift_fresh"]):  # the first step makes the optimizer's memory
            with Waiting(*also) as waiting:
                parts = parallel_model.forward_backward(batches, 0)
                parallel_model.optimizer_step(optimizer, None)
                parallel_model.scaler.loss_and_count(parts["loss"])
            assert waiting.seen == []


class Numbered(Plain):
    """Weights that are Python numbers: as_tensor(number, device="cuda") would copy each from the host."""

    def weight(self, target: Any) -> int:
        return len(target[0])


def test_weights_that_are_numbers_do_not_wait_for_the_device(tmp_path: Path) -> None:
    with made(tmp_path, Numbered(), micro_batches=2) as run:
        run.trainer.begin(None)
        batches = next(iter(run.trainer.train_loader.epoch(0)))
        run.trainer.model.before_first_step = False
        with Waiting("lift_fresh") as waiting:
            run.trainer.model.forward_backward(batches, 0)
        assert waiting.seen == []


class Counting(Plain):
    """Figures as the product's own task counts them: torch.bincount waits for a GPU."""

    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        return Classification().metrics(output, target[0])

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return Classification().finish(totals)


@pytest.mark.parametrize("task", [Counting, Weighted])
def test_nothing_in_an_evaluation_waits_for_the_device(tmp_path: Path, task: type[Plain]) -> None:
    with made(tmp_path, task()) as run:
        trainer = run.trainer
        trainer.begin(None)
        assert trainer.eval_loader is not None
        for batch, valid in trainer.eval_loader.batches():
            with Waiting("lift_fresh") as waiting:
                trainer.model.evaluate(batch, valid)
            assert waiting.seen == []


@pytest.mark.gpu
@pytest.mark.parametrize("skip", [False, True])
def test_nothing_in_a_step_waits_for_the_gpu(tmp_path: Path, skip: bool) -> None:
    with made(tmp_path, device="cuda", max_norm=1.0, steps=40, log_trigger=Trigger([Interval(steps=2)])) as run:
        trainer = run.trainer
        if skip:
            trainer.model.skip_broken_steps()
        trainer.begin(None)
        batches = [batches for epoch in (0, 1) for batches in trainer.train_loader.epoch(epoch)]
        trainer.train_step(batches[0])
        with no_waiting():
            for step in batches[1:3]:
                trainer.train_step(step)


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_in_an_evaluation_waits_for_the_gpu(tmp_path: Path, micro_batches: int) -> None:
    with made(tmp_path, Counting(), device="cuda", micro_batches=micro_batches) as run:
        trainer = run.trainer
        trainer.begin(None)
        assert trainer.eval_loader is not None
        with no_waiting():
            for batch, valid in trainer.eval_loader.batches():
                trainer.model.evaluate(batch, valid)


@contextmanager
def no_waiting() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [34, 33])
def test_a_batch_norm_without_statistics_is_tried_with_as_many_samples_as_it_gets(size: int) -> None:
    class Sized(ToyData):
        def evaluation(self) -> Any:
            return torch.utils.data.Subset(super().evaluation(), range(size))

    network = torch.nn.Sequential(Net(), torch.nn.BatchNorm1d(CLASSES, track_running_stats=False))
    with Single(machine=Machine(launch=Launch(), device="cpu", precision="fp32")) as strategy:
        loader = EvalLoader(Sized(), Sized().evaluation(), strategy.slice, 32, 1, LoaderOptions())
        model = strategy.build(Plain(), network, loader.example())
        said = pytest.raises(Refusal, match=r"^1 is a BatchNorm .* of 33 samples .* a micro-batch of one")
        with said if size % 32 == 1 else nullcontext():
            trial_evaluation(strategy, model, Plain(), loader, {})


def test_a_trial_that_fails_on_one_sample_says_that_it_had_one() -> None:
    class Squeezes(Plain):
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return torch.nn.functional.binary_cross_entropy_with_logits(output[:, :1].squeeze(), target[0].double())

    with Single(machine=Machine(launch=Launch(), device="cpu", precision="fp64")) as strategy:
        loader = EvalLoader(ToyData(), ToyData().evaluation(), strategy.slice, 32, 1, LoaderOptions())
        model = strategy.build(Squeezes(), Net(), loader.example())
        with pytest.raises(ValueError, match="Target size") as caught:
            trial_evaluation(strategy, model, Squeezes(), loader, {})
        assert caught.value.__notes__[0].startswith("This was a trial with a batch of 1 sample, ")
