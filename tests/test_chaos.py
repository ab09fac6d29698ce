"""scripts/chaos: faults are drawn from a seed, strike for real, and whatever is lost of a run is told."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import pytest

from scripts.faults.blow import Blow
from scripts.faults.chaos import main
from scripts.faults.left import Left
from scripts.faults.plan import Fault, draw
from scripts.faults.report import differences, table
from scripts.faults.strikes import STRIKES
from tests.commands import SMALL, TRANSFORMER
from tests.inside import here
from tests.warm import ROOT, Forked

WORDS = (*SMALL, "device=cpu", "log=[]", "loop.steps=360", "loop.save_every=8", "loop.eval_every=180")


def test_a_seed_gives_one_list_in_which_every_kind_comes_before_one_comes_again() -> None:
    kinds = list(STRIKES)
    for seed in range(20):
        faults = draw(600, 30, kinds, seed)
        assert faults == draw(600, 30, kinds, seed) != draw(600, 30, kinds, seed + 100)
        assert all(10 <= later.step - sooner.step <= 30 for sooner, later in pairwise(faults))
        assert 1 <= faults[0].step < faults[-1].step < 600
        assert {*Counter(fault.kind for fault in faults).values()} == {2, 3}
    assert draw(600, 0, kinds, 0) == []


def test_what_the_table_of_faults_names_is_there() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`((?:\w+/)?test_\w+\.py) -k (\w+)`", page)
    assert len(named) > 40
    for file, word in named:
        tests = re.findall(r"^ *def (test_\w+)", (ROOT / "tests" / file).read_text(), re.MULTILINE)
        assert any(word in test for test in tests), f"{file} -k {word}"
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {kind for kind in STRIKES if not any(f"`{kind}`" in row for row in rows)} == set()


def test_seconds_are_told_by_kind_and_phase() -> None:
    fault = Fault(20, "kill_rank")
    blows = [Blow(fault, 24, 100.0, 101.0, 20, 111.0, 112.0, 112.0 + more) for more in (0.5, 0.7)]
    assert blows[0].spent == {"detect": 1.0, "restart": 10.0, "reload": 1.0, "redo": 0.5}
    heads, row, _ = table(blows)
    assert heads.split() == ["fault", "times", "detect", "restart", "reload", "redo", "lost", "steps", "again"]
    assert row.split() == ["kill_rank", "2", "1.0", "10.0", "1.0", "0.6", "12.6", "8"]


def warm(arguments: list[str], environment: Mapping[str, str], screen: BinaryIO) -> Forked:
    """`python -m …` in a copy of the warm process, which looks for modules in its folder and not in PYTHONPATH."""
    place = Path(environment["PYTHONPATH"].split(os.pathsep)[0])
    return Forked(arguments[2:], place, dict(environment), screen.fileno())


@pytest.mark.long
def test_a_run_is_the_same_after_faults_and_nothing_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kinds = "kill_rank,flip,torn_line,nan"
    code = main(["--kinds", kinds, "--faults=4", "--seed=3", f"--keep={tmp_path / 'kept'}", *WORDS], warm)
    said = capfd.readouterr().out
    assert code == 0, said
    for line in (
        "faults      4: flip 1, kill_rank 1, nan 1, torn_line 1",
        "starts      5, of which 5 by the same command",
        "the same    every loss to the bit, evaluations, weights, optimizer; nothing is left behind",
    ):
        assert line in said.splitlines()
    run = tmp_path / "kept" / "disk" / "run"
    assert json.loads((run / "status.json").read_text())["attempt"] == 5  # they struck
    screens = "".join(path.read_text() for path in (tmp_path / "kept").glob("disk-run-*.screen"))
    for words in (" is skipped: ", "the loss is nan"):
        assert words in screens


LONG = (*TRANSFORMER, "loop.log_every=1", "device=cpu", "log=[]", "loop.global_batch=120", "loop.steps=250")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "--seed=1 --processes=2 strategy=ddp",
        "--seed=2 --processes=2 --max-restarts=3 strategy=fsdp",
        "--seed=3 --processes=2 strategy=pp loop.micro_batches=2",
        "--seed=4 --processes=4 --max-restarts=3 strategy=ddp_tp",
    ],
)
def test_so_it_is_under_every_kind_of_strategy(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["--faults=5", *words.split(), *LONG, "loop.save_every=10"])
    assert code == 0, capfd.readouterr()


@pytest.mark.slow
@pytest.mark.long
def test_kills_while_nearly_all_time_goes_into_saves_tear_no_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    """Of the network 8 MB, of the optimizer 16 MB; both ranks write in every step."""
    network = ["model=mlp", "model.width=1024", "model.depth=3", "strategy=fsdp", "device=cpu", "log=[]"]
    kinds = ["--processes=2", "--kinds=kill_rank,kill_all,kill_launcher", "--faults=4", "--seed=5"]
    code = main([*kinds, *network, "loop.steps=40", "loop.save_every=1", "loop.eval_every=null"])
    assert code == 0, capfd.readouterr()


@pytest.mark.slow
@pytest.mark.long
def test_a_lab_is_struck_where_its_samples_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(Path(__file__).parent / "lab", tmp_path / "lab", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    lab = [
        "--config-dir",
        "lab/conf",
        "model=look",
        "data=cells",
        "task=sorting",
        "loader.workers=1",
        "loop.global_batch=10",
    ]
    words = ["--processes=2", "--kinds=kill_worker", "--faults=2", *lab, "device=cpu", "log=[]", "loop.steps=200"]
    code = main(
        [*words, "loop.global_batch=10", "loop.save_every=10", "loop.eval_every=null", f"--keep={tmp_path / 'kept'}"]
    )
    assert code == 0, capfd.readouterr()
    screens = "".join(path.read_text() for path in (tmp_path / "kept").glob("disk-run-*.screen"))
    assert screens.count("is killed by signal: Killed") >= 2, screens


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos") / "run"
    assert here(*SMALL, "loop.steps=6", "loop.save_every=3", "loop.eval_every=3", f"run.dir={folder}") == 0
    return folder


def test_whatever_is_not_the_same_is_named(undisturbed: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(undisturbed, other)
    assert differences(Left(other), Left(undisturbed)) == []
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= {"loss_hex": "00000000"}
    lines[-1] |= {"accuracy": 2}
    text = "".join(json.dumps(line) + "\n" for line in [*lines, next(line for line in lines if line["step"] == 5)])
    (other / "metrics.jsonl").write_text(text)
    weights = next((other / "checkpoints" / "step-00000006").glob("*model-00001*"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = differences(Left(other), Left(undisturbed))
    assert [one.split(" ", 2)[0] for one in found] == ["step", "loss_hex", "the", "1"], found
    assert found[1] == "loss_hex of 1 of 6 steps differs or is missing, from step 2 on"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kinds kill_rank,explode", "--kinds: there is no explode; there are kill_rank, kill_all,"),
        ("run.dir=runs/a", "run.dir=runs/a: the folder is chosen here"),
        ("loop.stepps=3", "loop.stepps: there is no such key"),
        ("loop.global_batch=7 loop.micro_batches=2 device=cpu log=[]", "loop.global_batch"),
    ],
)
def test_what_cannot_be_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split(), warm) == 2
    assert capsys.readouterr().err.startswith(f"scripts/chaos: {said}")
