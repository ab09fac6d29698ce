"""Networks whose ranks use different layers: a mixture of experts trains as in one process, or a run is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import finish, single
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from trainer.launch.rendezvous import Launch
from trainer.messages import FatalRunError, Refusal

WORDS = ("--config-dir", "conf", "trust=[tests]", "loader.workers=0", "loop.global_batch=8", "loop.steps=6")
NETWORKS = {
    "blocks": "Blocks",
    "named": "Blocks\nnamed: true",
    "flat": "Flat",
    "thrown": "Thrown",
    "dropped": "Dropped",
    "windows": "Windows",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sparse")
    (place / "conf/model").mkdir(parents=True)
    for name, target in NETWORKS.items():
        (place / f"conf/model/{name}.yaml").write_text(f"_target_: tests.strategies.experts.{target}\n")
    return place


def trained(launch: Launch, place: Path, words: list[str]) -> Any:
    """The losses of a run's steps and of its evaluation; or how it was refused."""
    folder = place / "-".join([f"{launch.world_size}", *(word.rsplit("=")[-1] for word in words)])
    try:
        assert product(launch, place, [*WORDS, "loop.log_every=1", f"run.dir={folder}", *words]) == 0
    except (Refusal, FatalRunError) as ended:
        return str(ended)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


SPREAD = [
    (2, "fsdp", []),
    (4, "hsdp", []),
    (2, "fsdp", ["loop.micro_batches=2", "strategy.activation_checkpointing=units"]),
    (2, "zero1", []),
    (2, "ddp", ["strategy.find_unused_parameters=true"]),
]
WINDOWS = [(2, "fsdp", own) for own in ([], ["strategy.reshard_after_forward=false"])]
CASES = [(network, *spread) for network in ("blocks", "flat") for spread in SPREAD]
CASES += [("named", 2, "fsdp", []), *[("windows", *spread) for spread in WINDOWS]]


@pytest.mark.parametrize(
    ("network", "size", "strategy", "own"), quickly(CASES, *[(name, 2, "fsdp", []) for name in ("blocks", "windows")])
)
def test_layers_that_some_samples_use_train_as_in_one_process(
    processes: Processes, home: Path, network: str, size: int, strategy: str, own: list[str]
) -> None:
    words = [f"model={network}"]
    (reference,) = processes.run(1, trained, home, [*words, "strategy=single", "run.resume=fresh"])
    losses, *_ = processes.run(size, trained, home, [*words, f"strategy={strategy}", *own])
    assert losses == pytest.approx(reference, rel=1e-5)


def test_who_calls_other_layers_is_refused_before_they_are_gathered(processes: Processes, home: Path) -> None:
    said = processes.run(2, trained, home, ["model=thrown", "strategy=fsdp", "+model.forwards=0"])
    assert len({*said}) == 1
    assert "different modules: layers.0 on rank 0; head on rank 1. " in said[0]
    assert not list(home.glob("*thrown*/checkpoints/*"))


@pytest.mark.long
def test_who_begins_to_call_other_layers_is_refused_too(home: Path) -> None:
    words = ["model=thrown", "strategy=fsdp", "+model.forwards=3", "run.dir=late", "loop.log_every=1", "device=cpu"]
    screen = finish(single(*WORDS, "processes=2", *words), home, code=1)
    assert "data ranks call different modules: head on rank 1; layers.0 on others, as before. " in screen
    steps = [json.loads(line)["step"] for line in (home / "late/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]  # nothing was learned from the fourth


@pytest.mark.long
def test_layers_that_all_ranks_leave_out_together_are_no_matter(processes: Processes, home: Path) -> None:
    losses = [processes.run(2, trained, home, ["model=dropped", f"strategy={word}"])[0] for word in ("zero1", "fsdp")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
