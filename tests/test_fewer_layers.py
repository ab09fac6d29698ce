"""A proof with fewer layers: which ones stay, and that nothing else is another than in the whole network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests import test_verify
from tests.commands import finish
from tests.inside import product
from tests.planted.networks import CLASSES, WIDTH, OwnRank
from tests.planted.plant import EXACT, GPT, NET, VIT
from tests.planted.proofs import verdict, verified
from tests.processes import Processes
from tests.quick import quickly
from trainer.jobs.run_parts import PreparedRun
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.verify.reference import make_reference_in_child
from trainer.verify.training_record import Phase, TrainingRecord

pytestmark = pytest.mark.slow


class Deep(nn.Module):
    """Layers in a list, of which a forward makes something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        layers = [nn.Linear(16, 16) for _ in range(9)]
        if kind == "mistake":
            layers[4] = OwnRank(16, 16)
        if kind == "widths":  # the middle ones cannot be left out alone
            layers = [nn.Linear(16 + at, 17 + at) for at in range(8)] + [nn.Linear(24, 16)]
        self.layers: Any = nn.ModuleList(layers)
        if kind == "named":
            self.layers = nn.Sequential()
            for at, layer in enumerate(layers):
                self.layers.add_module(f"layer{at}", layer)
        if kind == "kept":
            self._also = [*self.layers]
        self.others = nn.ModuleList(nn.Linear(16, 16) for _ in range(9)) if kind in ("pairs", "half") else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.kind == "by_number":
            x = x + self.layers[7](x)
        if self.others is not None:
            for one, other in zip(self.layers, self.others, strict=True):
                x = x + other(torch.tanh(one(x)))
            if self.kind == "half":
                x = self.others[5](x)
            return self.head(x)
        for layer in self._also if self.kind == "kept" else self.layers:
            x = torch.tanh(layer(x))
        if self.kind == "values":  # no forward on shapes
            x = x * (1.0 + 0.0 * float(self.embed.weight.sum().item()))
        return self.head(x)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder, with a network more."""
    place = tmp_path_factory.mktemp("planted")
    test_verify.write_lab(place)
    (place / "conf/model/deep.yaml").write_text("_target_: tests.test_fewer_layers.Deep\nkind: ???\n")
    return place


DEEP = {"gpt": [*GPT, "model.depth=9"], "vit": [*VIT, "model.depth=9"]}
SPREAD = {
    f"{network} {strategy}": (network, size, strategy, own)
    for network in DEEP
    for size, strategy, own in (
        (2, "ddp", []),
        (2, "fsdp", ["strategy.activation_checkpointing=units"]),
        (2, "tp", []),
        (2, "pp", ["loop.micro_batches=2"]),
        (4, "fsdp_tp", []),
    )
}


@pytest.mark.long
@pytest.mark.parametrize("name", quickly(SPREAD, "gpt fsdp", "vit pp"))
def test_a_shorter_network_is_proven_under_every_strategy(processes: Processes, home: Path, name: str) -> None:
    network, size, strategy, own = SPREAD[name]
    words = [*DEEP[network], "precision=fp64", "job.layers=2"]
    said = verdict(processes, home, size, words, [f"strategy={strategy}", *own])
    assert said.startswith(f"SAME: {strategy} on {size}, "), said
    assert "note        fewer layers, here and in the reference: job.layers=2\n" in said
    assert "of blocks: 2 of 9 Block (of 9 layers these: 0, 8)\n" in said


def short(place: Path, words: list[str], name: str = "short") -> TrainingRecord:
    """The reference that these words make."""
    file = place / f"{name}.safetensors"
    assert product(Launch(), place, [*words, EXACT, "job=verify", f"job.record={file}", f"run.dir={file}.run"]) == 0
    return TrainingRecord.read(file)


def places(record: TrainingRecord) -> dict[str, list[int]]:
    """The layers that stay, by list."""
    return {fewer["name"]: fewer["places"] for fewer in record.facts["fewer"]}


LISTS = {
    "plain": {"layers": [0, 8]},
    "mistake": {"layers": [0, 4, 8]},
    "named": {"layers": [0, 8]},
    "values": {"layers": [0, 8]},
    "pairs": {"layers": [0, 8], "others": [0, 8]},
    "by_number": {},  # a forward that counts on all of them
    "half": {},
    "kept": {},
    "widths": {},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", LISTS)
def test_a_list_is_cut_where_the_forward_can_do_without(home: Path, kind: str) -> None:
    record = short(home, [*NET, "model=deep", f"model.kind={kind}", "job.layers=2"])
    assert places(record) == LISTS[kind]


@pytest.mark.long
def test_blocks_of_a_foreign_network_with_stages_are_cut_and_their_first_ones_stay(home: Path) -> None:
    words = [*NET, "model=resnet18", "data=digits", "task=classification", "loop.global_batch=4", "job.layers=1"]
    words += ["model.num_classes=10", "model.channels=1", "model.image_size=8"]
    assert places(short(home, words)) == {"layer1": [0]}  # in the others both blocks differ


def test_what_is_frozen_and_what_has_a_rate_of_its_own_stays_so(home: Path) -> None:
    words = [*NET, "model=deep", "model.kind=plain", "model.freeze=['layers.[0-2]']", "job.layers=1"]
    record = short(home, [*words, "optimizer.groups=[{pattern:layers.8,lr:0.5},{pattern:layers.7,lr:0.25}]"])
    assert places(record) == {"layers": [0, 3, 7, 8]}
    rates = {key.name: record.table(key)[0, 0].item() for key in record.values if key[:2] == (1, Phase.RATE)}
    weights = [f"layers.{at}.weight" for at in range(5)]
    assert [name in rates for name in weights] == [False, True, True, True, False]
    usual, quarter, half = (rates[name] for name in weights[1:4])
    assert rates["head.weight"] == usual
    assert len({usual, quarter, half}) == 3


@pytest.mark.long
def test_a_mistake_in_a_layer_of_its_own_kind_is_found_in_the_shorter_network(processes: Processes, home: Path) -> None:
    words = [*NET, EXACT, "model=deep", "model.kind=mistake", "job.layers=2"]
    said = verdict(processes, home, 2, words, ["strategy=ddp"])
    assert said.startswith("DIFFERS at step 1, forward, layers.1, samples of rank 1, "), said
    assert "cause: the network: what this module computes differs when other processes are in sight" in said
    assert "of layers: 2 of 8 Linear (of 9 layers these: 0, 4, 8)" in said


@pytest.mark.long
def test_a_pipeline_needs_a_layer_for_each_stage(processes: Processes, home: Path) -> None:
    words, own = [*DEEP["vit"], EXACT], ["strategy=pp", "strategy.schedule=Interleaved1F1B", "loop.micro_batches=2"]
    file = home / "stages.safetensors"
    assert processes.run(1, verified, home, [*words, "job.layers=2", f"job.record={file}"]) == [(0, "")]
    told = processes.run(2, verified, home, [*words, *own, f"job.reference={file}", f"run.dir={home / 'stages'}"])
    assert all("has 4 stages: a layer for each is needed; job.layers=4 works" in said for said, _ in told), told
    said = verdict(processes, home, 2, [*words, "job.layers=4"], own)
    assert said.startswith("SAME: pp on 2, "), said
    assert "of blocks: 4 of 9 Block (of 9 layers these: 0, 3, 5, 8)" in said


def with_memory(launch: Launch, place: Path, words: list[str], free: float) -> tuple[Any, str]:
    """The same where so many bytes are free."""
    with patch("trainer.verify.reference.available_host_memory", lambda: free):
        return verified(launch, place, words)


@pytest.mark.long
def test_what_one_process_cannot_hold_is_made_shorter_by_itself(processes: Processes, home: Path) -> None:
    file = home / "shortage.safetensors"
    words = [*DEEP["gpt"], EXACT, f"job.record={file}", f"run.dir={home / 'shortage'}"]
    assert processes.run(1, with_memory, home, words, 3e6) == [(0, "")]
    facts = TrainingRecord.read(file).facts
    assert facts["fewer"][0]["places"] == [0, 8]
    # (weights, gradients, two moments of AdamW, and a copy of all but the gradients) of 8 bytes
    assert " numbers × 56 bytes = 7." in facts["shorter"]
    assert "and 3.0 MB are free" in facts["shorter"]
    for free, why in ((1e6, "one process cannot hold it with fewer layers, either (blocks: 2 of 9"), (1e5, "builds")):
        ((said, _),) = processes.run(1, with_memory, home, words, free)
        assert why in said
        assert "MB are free" in said


@pytest.mark.long
def test_a_reference_whose_memory_ran_out_is_made_again_with_fewer_layers(home: Path) -> None:
    asked: list[int | None] = []

    def made(run: PreparedRun, samples: int, path: Path, layers: int | None) -> str:
        asked.append(layers)
        return make_reference_in_child(run, samples, path, layers) if layers else "can't allocate memory"

    words = [*NET, EXACT, "device=cpu", "model=deep", "model.kind=plain", f"run.dir={home / 'again'}", "job=verify"]
    with patch("trainer.verify.reference.make_reference_in_child", made):
        assert product(Launch(), home, words) == 0
        assert asked == [None, 2]
        said = json.loads((home / "again/verify/verify.json").read_text())
        assert said["fewer"][0]["places"] == [0, 8]
        assert "ran out of memory" in said["shorter"]
        with pytest.raises(Refusal, match=r"does not fit into one process.*job.layers=2, or null"):
            product(Launch(), home, [*words, "job.layers=all"])


@pytest.mark.long
def test_under_a_limit_of_memory_the_command_makes_a_shorter_copy(tmp_path: Path) -> None:
    sizes = ["model=gpt_nano", "model.width=512", "model.heads=8", "model.depth=24"]  # 4.3 GB in one process
    data = ["data=synthetic_tokens", "data.length=16", "data.size=64", "data.evaluation_size=16", "task=language"]
    words = [*sizes, *data, "loop.global_batch=8", "device=cpu", EXACT, "loader.workers=0", "run.dir=run"]
    asked = "import torch; print(open('/proc/self/statm').read().split()[0])"
    pages = int(subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout)
    command = (
        f"ulimit -v {pages * 4 + 2_900_000}; exec {sys.executable} -m trainer processes=2 job=verify strategy=fsdp"
    )
    said = finish(["bash", "-c", f"{command} {' '.join(words)}"], tmp_path)
    assert "SAME: fsdp on 2, 3 steps, fp64 gap" in said
    assert "75,928,576 numbers × 56 bytes = 4.3 GB in fp64" in said
    assert "of blocks: 2 of 24 Block (of 24 layers these: 0, 23)" in said
