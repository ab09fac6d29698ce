"""`job=verify`: what trains as one process does is the same; of what does not, the first thing is found and named."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import trainer
from tests.planted.plants import GPT, GRAPHS, MICRO, NET, PLANTS, RIGHT, ROWS
from tests.run import TRANSFORMER, quickly, run
from trainer import Refusal

UNITS = "strategy.activation_checkpointing=units"
_runs = count()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where references lie, one for all that have its words."""
    return tmp_path_factory.mktemp("verify")


def verdict(home: Path, words: list[str], own: list[str], size: int = 2, code: int = 0) -> str:
    """What the ranks say of these words with their own ones (strategy, micro-batches), after the reference was made."""
    file = home / f"{abs(hash(tuple(words)))}.safetensors"
    if not file.exists():
        run([*words, "job=verify", f"job.record={file}", f"run.dir={file}.run"])
    folder = home / f"run-{next(_runs)}"
    chosen = [*words, *own, "job=verify", f"job.reference={file}", f"run.dir={folder}"]
    said = run(chosen, size, "group", code=code).out
    assert json.loads((folder / "verify/verify.json").read_text())["same"] == (code == 0)
    assert not (folder / "verify/trial").exists()
    return said


@pytest.mark.parametrize("name", quickly(PLANTS, "own_rank", "summed"))
def test_a_mistake_is_found_where_it_is_and_its_cause_is_named(processes: object, home: Path, name: str) -> None:
    plant = PLANTS[name]
    exact = [] if any(word.startswith("precision=") for word in plant.words) else ["precision=fp64"]
    said = verdict(home, [*exact, *plant.words], plant.own, code=1)
    assert re.search(f"^DIFFERS {re.escape(plant.found)}", said, re.MULTILINE), said
    assert plant.cause in said, said
    proved = "cause: not known" not in said and "without any it trains the same" not in said
    if proved and any("strategies." in word for word in plant.own):
        assert RIGHT in said, said  # whatever the network and its data are


IMAGES = ["model=torchvision", "model.name=resnet18", "data=synthetic_images", "data.size=48", "data.image_size=32"]
LISTED = [*NET, *ROWS, "data._target_=tests.planted.users.Listed"]
# what is right: in which precision, and in which placements (processes, words)
HEALTHY: dict[str, tuple[list[str], list[tuple[int, str]]]] = {
    "transformer": (
        [*TRANSFORMER, "model.dropout=0.1", "loop.global_batch=24", "loop.max_norm=0.1"],
        [
            (1, "strategy=single loop.micro_batches=3"),
            (2, f"strategy=fsdp {UNITS}"),
            (2, "strategy=tp"),
            (2, f"strategy=pp strategy.schedule=Interleaved1F1B {MICRO}"),
            (4, "strategy=fsdp_tp"),
            (4, f"strategy=ddp_pp {MICRO}"),
        ],
    ),
    "decoder": ([*GPT, "precision=bf16"], [(2, "strategy=cp")]),
    "images": (
        [*IMAGES, "loop.global_batch=8", "strategy.sync_bn=true"],
        [(2, "strategy=ddp"), (4, "strategy=hsdp")],
    ),
    "odd": (
        [*NET, "model.kind=odd", "precision=fp64"],
        [(2, "strategy=fsdp"), (2, f"strategy=ddp {UNITS}")],
    ),
    "listed": ([*LISTED, "precision=fp16"], [(2, f"strategy=ddp {MICRO}"), (2, "strategy=zero1")]),
    "graphs": ([*NET, *GRAPHS, "precision=fp32"], [(2, "strategy=ddp")]),
    "spare": (
        [*NET, "model.kind=spare", "precision=fp32"],
        [(2, "strategy=zero1"), (2, "strategy=fsdp"), (2, "strategy=ddp strategy.find_unused_parameters=true")],
    ),
}


@pytest.mark.parametrize("name", quickly(HEALTHY, "graphs"))
def test_there_is_no_false_alarm(processes: object, home: Path, name: str) -> None:
    words, places = HEALTHY[name]
    for size, own in places:
        strategy = own.split()[0].removeprefix("strategy=")
        said = verdict(home, words, own.split(), size)
        assert re.search(f"^SAME: {strategy} on {size}, 3 steps, ", said, re.MULTILINE), said


@pytest.mark.long
def test_what_cannot_compute_in_fp64_is_compared_in_fp32(processes: object, home: Path) -> None:
    said = verdict(home, [*NET, "model.kind=complex", "precision=fp32"], ["strategy=fsdp"])
    assert re.search("^SAME: fsdp on 2, 3 steps, fp32 gap ", said, re.MULTILINE), said
    assert "note        it does not compute in fp64 (" in said


@pytest.mark.long
def test_a_key_that_makes_gradients_narrow_is_tried_and_named(processes: object, home: Path) -> None:
    said = verdict(home, [*NET, "precision=fp32"], ["strategy=ddp", "strategy.compress=bf16"], code=1)
    assert "DIFFERS in its precision alone: ddp on 2, fp64 gap " in said
    assert "cause: strategy.compress=bf16, which is narrower than precision=fp32; without it the strategy" in said


@pytest.mark.long
def test_ranks_that_gather_different_layers_are_told_so_before_they_do(processes: object, home: Path) -> None:
    words, file = [*NET, "model.kind=chosen_layer", "job=verify"], home / "chosen_layer.safetensors"
    run([*words, f"job.record={file}", f"run.dir={file}.run"])
    words += ["strategy=fsdp", f"job.reference={file}", f"run.dir={home / 'chosen'}"]
    said = run(words, 2, "group", code=1).out
    assert re.search(r"DIFFERS at step 1, forward, (middle\.layers\.\d): what is called is \1 on rank 0", said), said
    assert "a choice of layers by a rank's own samples" in said


def test_from_python_a_difference_is_raised_and_a_run_in_the_folder_stays_as_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    words = [*NET, "device=cpu", "log=[]", "run.dir=asked", "loop.micro_batches=3"]
    assert trainer.run([*words, "loop.epochs=null", "loop.steps=1"]).metrics
    asked = [*words, "job=verify", "model.kind=centred", "loop.epochs=null", "loop.steps=2"]
    trainer.run([*asked, "job.record=python.safetensors"])
    with pytest.raises(RuntimeError, match=r"^DIFFERS at step 1, forward, middle"):
        trainer.run([*asked, "job.reference=python.safetensors"])
    others = ["optimizer.lr=0.5", "job.batch=6", "strategy=ddp", "precision=bf16", "loop.micro_batches=1"]
    said = r"made with other words \(optimizer\.lr: 0\.001 → 0\.5, job\.batch: 24 → 6\): give"
    with pytest.raises(Refusal, match=said):
        trainer.run([*asked, "job.reference=python.safetensors", *others])
    assert {path.name for path in (home / "asked").iterdir()} > {"verify", "checkpoints", "metrics.jsonl"}


def test_what_cannot_be_proved_is_refused(home: Path) -> None:
    text, weights = home / "text.safetensors", home / "weights.safetensors"
    text.write_text("a note")
    save_file({"weight": torch.zeros(2)}, weights)
    refused = {
        f"job.reference={text}": "is no reference, or an older version has written it; job.record=",
        f"job.reference={weights}": "is no reference, or an older version has written it; job.record=",
        "data._target_=tests.planted.users.GlobalOrder": "GlobalOrder.order(0) is another one when it is asked for",
        "model.kind=complex precision=fp64": "precision=fp64: middle.weight is complex, ",
    }
    for word, said in refused.items():
        assert said in run([*NET, "job=verify", *word.split(), f"run.dir={home / 'refused'}"], code=2).out


@pytest.mark.long
def test_the_command_makes_its_own_reference(tmp_path: Path) -> None:
    words = ["model=mlp", "model.width=16", "model.depth=1", "loop.global_batch=16", "run.dir=run", "strategy=fsdp"]
    said = run([*words, "job=verify", "device=cpu"], 2, "process", place=tmp_path).out
    assert "SAME: fsdp on 2, 3 steps, fp64 gap" in said
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"verify"}
