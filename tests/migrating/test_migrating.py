"""Programs as people write them, beside the commands that replace them: the same losses, and their weights taken along.

What docs/migrating.md says of them is read from the page, and held here. `tutorial_NAME.py` is the program,
`tutorial_NAME.sh` the command; the page quotes both.
"""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.migrating.files import TESTED, write
from tests.ranks import Processes
from tests.run import SMALL, curve, far, lines, run

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "migrating.md").read_text()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# how each is started: what stands behind `python`, without the script itself
STARTED: dict[str, tuple[str, ...]] = {
    "dp": (str(HERE / "unpublished.py"),),
    "spawn": (),
    "ddp": (*TORCHRUN, str(HERE / "unpublished.py")),
    "lightning": (),
    "accelerate": TORCHRUN,
}
PACKAGES = {"lightning": "lightning", "accelerate": "accelerate"}
LEFT = {  # what each leaves of its network
    **{name: f"tutorial_{name}.pt" for name in ("dp", "spawn", "ddp")},
    "lightning": "checkpoints/best.ckpt",
    "accelerate": "tutorial_accelerate",
}
PADDED = ("spawn", "lightning")  # they evaluate the odd one twice


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `data` of all programs."""
    return write(tmp_path_factory.mktemp("data"))


@pytest.fixture
def home(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user would type: a lab, and the data."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # GPUs add in another order than the commands here, on CPUs
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as `accelerate launch --cpu` says it
    monkeypatch.setenv("MASTER_PORT", str(_free_port()))
    shutil.copytree(HERE / "lab", tmp_path / "lab")
    (tmp_path / "data").symlink_to(data)
    return tmp_path


def typed(name: str) -> tuple[list[str], list[str]]:
    """The command that replaces a program, as a shell reads it: what starts it, and the words behind `trainer`."""
    command = shlex.split((HERE / f"tutorial_{name}.sh").read_text().replace("\\\n", " "))
    at = command.index("trainer") + 1
    return command[:at], command[at:]


def words(name: str, *more: str) -> list[str]:
    """The command's words; its samples in the program's order, and images in memory as there."""
    own = [word for word in typed(name)[1] if not word.startswith(("data=", "processes="))]
    lab = [] if "--config-dir" in own else ["--config-dir", "lab/conf"]
    exactly = (f"data={pictures_of(name)}_as_sampled", "channels_last=false", "loop.log_every=1", "device=cpu")
    return [*lab, *own, *exactly, *more]


def pictures_of(name: str) -> str:
    """The data set of a program."""
    return "cifar10" if name in ("dp", "ddp") else "fashion_mnist"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def figures(name: str, home: Path, screen: str) -> tuple[list[float], list[float]]:
    """The losses of a program's steps, and the accuracies of its evaluations."""
    if name == "lightning":
        rows = list(csv.DictReader((home / "logs/tutorial/version_0/metrics.csv").read_text().splitlines()))
        losses, accuracies = ([float(row[key]) for row in rows if row[key]] for key in ("loss", "accuracy"))
        return losses, accuracies
    said = re.findall(r"step (\d+) loss ([\d.]+)", screen)
    assert [int(step) for step, _ in said] == list(range(1, len(said) + 1))
    return [float(loss) for _, loss in said], [float(found) for found in re.findall(r"accuracy ([\d.]+)", screen)]


def compare(name: str, home: Path, screen: str) -> None:
    """What the page's table says of a program and its command; and the command goes on from what the program left."""
    steps, bound, accuracy = re.search(rf"`tutorial_{name}.py`.*\| (\d+) \| ([\de.-]+) \| (.*) \|", PAGE).groups()
    losses, accuracies = figures(name, home, screen)
    assert far(curve(home / "run")[: int(steps)], losses[: int(steps)]) < float(bound)
    found = lines(home / "run", "eval")[-1]
    assert found["samples"] == TESTED[pictures_of(name)]
    if accuracy == "the same":
        assert found["accuracy"] == pytest.approx(accuracies[-1], abs=1e-5)
    elif accuracy == "one image counts twice":
        same_but_for_one(found["accuracy"], accuracies[-1])

    begin = [f"init_from={home / LEFT[name]}", "optimizer.lr=0", "loop.steps=1", "strategy=single", "run.dir=on"]
    # in what is frozen the BatchNorms keep their statistics, too
    frozen = ["model.freeze=[backbone]"] if pictures_of(name) == "cifar10" else []
    run(words(name, *begin, *frozen), place=home)
    log = (home / "on" / "logs" / "rank-0.log").read_text()
    assert "tensors from" in log
    assert "stay as built" not in log
    again = lines(home / "on", "eval")[-1]["accuracy"]
    best = max(accuracies) if name == "lightning" else accuracies[-1]
    if name in PADDED:
        same_but_for_one(again, best)
    else:
        assert again == pytest.approx(best, abs=1e-5)


def same_but_for_one(exact: float, padded: float) -> None:
    """DistributedSampler gives both processes 51 of 101 pictures: one of them counts twice."""
    right, said = round(exact * 101), round(padded * 102)
    assert (exact, padded) == (pytest.approx(right / 101), pytest.approx(said / 102, abs=1e-5))
    assert said - right in (0, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", [*STARTED, "turns"])
def test_a_command_is_taken_as_it_stands(home: Path, name: str) -> None:
    assert "loop:" in run([*typed(name)[1], "--cfg", "job"], how="process", place=home).out


@pytest.mark.long
@pytest.mark.parametrize("name", STARTED)
def test_a_program_and_the_command_that_replaces_it_learn_the_same(name: str, home: Path) -> None:
    package = PACKAGES.get(name, "torch")
    if not find_spec(package):
        pytest.skip(f"needs {package}: pip install -e '.[bench]'")
    theirs = [sys.executable, *STARTED[name], str(HERE / f"tutorial_{name}.py")]
    screen = subprocess.run(theirs, cwd=home, check=True, capture_output=True, text=True).stdout
    start, own = typed(name)
    several = start[0] == "torchrun" or "processes=2" in own
    run(
        words(name, "run.dir=run"), 2 if several else 1, "torchrun" if start[0] == "torchrun" else "process", place=home
    )
    compare(name, home, screen)
    if name == "spawn":
        # of 401 samples the script makes 13 steps: the last one is smaller, and has a sample that an earlier one had
        assert (len(figures(name, home, screen)[0]), len(curve(home / "run"))) == (2 * 13, 2 * 12)


TURNS = {
    "single": [],
    "ddp": ["strategy.find_unused_parameters=true"],
    "fsdp": [],
    "zero1": [],
}


@pytest.mark.long
@pytest.mark.parametrize("strategy", TURNS)
def test_optimizers_that_take_turns_do_so_after_a_resume_too(processes: Processes, home: Path, strategy: str) -> None:
    theirs = [sys.executable, str(HERE / "tutorial_turns.py")]
    screen = subprocess.run(theirs, cwd=home, check=True, capture_output=True, text=True).stdout
    losses, _ = figures("turns", home, screen)
    turns = ["--config-dir", "lab/conf", "experiment=turns", f"strategy={strategy}", *TURNS[strategy], "run.dir=run"]
    for steps in (9, 24):  # the second one goes on with the generator's turn
        more = ["loop.log_every=1", "loop.epochs=null", f"loop.steps={steps}"]
        run([*turns, *more], 1 if strategy == "single" else 2, "group", place=home)
    assert far(curve(home / "run"), losses) < 1e-6


def test_weights_beside_objects_are_refused_until_they_stand_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    network = torch.nn.Linear(64, 10)
    state = {f"net.1.{name}": value for name, value in network.state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": Namespace(lr=0.1)}, "best.ckpt")
    begin = ["~model", "+model._target_=torch.nn.Sequential", "loop.steps=1", "trust=[torch]", "run.dir=run"]
    begin += [
        "+model._args_=[{_target_: torch.nn.Flatten},{_target_: torch.nn.Linear,in_features: 64,out_features: 10}]"
    ]
    said = run([*begin, "init_from=best.ckpt"], code=2).out
    assert "best.ckpt: it holds a argparse.Namespace, which only running code could read" in said
    exec(re.search(r'^python -c "(.*)"$', PAGE, re.MULTILINE)[1])
    run([*begin, "init_from=net.pt"])
    assert "2 tensors from" in (tmp_path / "run/logs/rank-0.log").read_text()


def rows() -> list[tuple[str, ...]]:
    """The words on the right of the page's tables, where they need no files and no longer run."""
    tables = [part.split("\n\n")[0] for part in PAGE.split("| here |")[1:]]
    right = [line.split("|")[2] for table in tables for line in table.splitlines() if line.count("|") > 2]
    spans = [re.findall(r"`(\+?[a-z][\w.]*=[^`]+)`", cell) for cell in right]
    found = dict.fromkeys(tuple(word for span in row for word in span.split()) for row in spans)
    more = re.compile(r"FILE|\.pt|\.ckpt|runs/|compile|job=|processes=|profile|fashion|wandb")
    return [row for row in found if row and not more.search(" ".join(row))]


@pytest.mark.parametrize(
    "own",
    [pytest.param(row, id=" ".join(row), marks=pytest.mark.long if at % 20 else ()) for at, row in enumerate(rows())],
)
def test_the_words_that_replace_a_script_train(tmp_path: Path, own: tuple[str, ...]) -> None:
    small = (*SMALL, "loop.global_batch=120", "loop.eval_every=1", f"run.dir={tmp_path / 'run'}")
    # of a key's values the last one: precision=bf16, precision=fp16
    last = {word.split("=")[0]: word for word in (*small, *own, "loop.steps=2")}
    assert run([*last.values()]).lines("train")[-1]["step"] == 2
