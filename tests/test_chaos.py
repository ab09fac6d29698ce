"""scripts/chaos: faults are drawn from a seed, strike for real, and whatever is lost of a run is told."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.faults.chaos import differences, draw, main
from scripts.faults.strikes import STRIKES
from tests.run import ROOT, SMALL, TRANSFORMER, lines, run, status

WORDS = ("device=cpu", "log=[]", "loop.log_every=1")


def test_a_seed_gives_one_list_in_which_every_kind_comes_before_one_comes_again() -> None:
    kinds = list(STRIKES)
    for seed in range(20):
        faults = draw(600, 25, kinds, seed)
        assert faults == draw(600, 25, kinds, seed) != draw(600, 25, kinds, seed + 100)
        assert all(12 <= later - sooner <= 36 for (sooner, _), (later, _) in pairwise(faults))
        assert 1 <= faults[0][0] < faults[-1][0] < 600
        assert {*Counter(kind for _, kind in faults).values()} == {2, 3}
    assert draw(600, 0, kinds, 0) == []


def test_what_the_table_of_faults_names_is_there() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`((?:\w+/)?test_\w+\.py) -k (\w+)`", page)
    assert len(named) > 30
    for file, word in named:
        # a test, or a case of one
        names = re.findall(r'^(?: *def test_|    ")(.*?)[(":]', (ROOT / "tests" / file).read_text(), re.MULTILINE)
        assert any(word in name for name in names), f"{file} -k {word}"
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {kind for kind in STRIKES if not any(f"`{kind}`" in row for row in rows)} == set()


def test_whatever_is_not_the_same_is_named(tmp_path: Path) -> None:
    quiet = run([*SMALL, "loop.steps=6", "loop.save_every=3", "loop.eval_every=3", "run.dir=quiet"], place=tmp_path)
    other = tmp_path / "other"
    shutil.copytree(quiet.folder, other)
    assert differences(other, quiet.folder) == []
    written = lines(other)
    written[1] |= {"loss_hex": "00000000"}
    written[-1] |= {"accuracy": 2}
    written.append(next(line for line in written if line["step"] == 5))
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    weights = next((other / "checkpoints" / "step-00000006").glob("*model-00001*"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = differences(other, quiet.folder)
    assert [one.split(" ", 2)[0] for one in found] == ["step", "loss_hex", "the", "1"], found
    assert found[1] == "loss_hex of 1 of 6 steps differs or is missing, from step 2 on"


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "--kinds=kill_rank,flip,torn_line,nan --faults=4 --seed=3 model=mlp loop.steps=1500 loop.save_every=20",
        "--kinds=kill_all,kill_launcher,drift --faults=3 --processes=2 strategy=ddp loop.steps=250 loop.save_every=10",
        "--faults=3 --seed=2 --processes=2 strategy=fsdp distributed.restarts=3 loop.steps=250 loop.save_every=10",
        # nearly all time goes into saves: of the network 8 MB, of the optimizer 16 MB; both ranks write in every step
        "--kinds=kill_rank,kill_all --faults=3 --seed=5 --processes=2 strategy=fsdp model=mlp model.width=1024"
        " model.depth=3 loop.steps=40 loop.save_every=1 loop.eval_every=null",
    ],
    ids=["alone", "ddp", "fsdp", "saving"],
)
def test_a_run_is_the_same_after_faults_and_nothing_is_left(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = [] if "model=" in words else [*TRANSFORMER, "loop.global_batch=120"]
    code = main([*words.split(), *network, *WORDS, f"--keep={tmp_path / 'kept'}"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "the same    every loss to the bit, evaluations, weights, optimizer; nothing is left behind" in said
    (count,) = re.findall(r"^faults      (\d)", said, re.MULTILINE)
    assert status(tmp_path / "kept" / "run")["attempt"] > int(count) >= 3  # they struck


@pytest.mark.long
def test_a_lab_is_struck_where_its_samples_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "tests" / "lab", tmp_path / "lab", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    words = "--processes=2 --kinds=kill_worker --faults=2 --config-dir lab/conf model=look data=cells task=sorting"
    more = "loader.workers=1 loop.global_batch=10 loop.steps=200 loop.save_every=10 loop.eval_every=null --keep=kept"
    assert main([*words.split(), *more.split(), *WORDS]) == 0, capsys.readouterr()
    screens = "".join(path.read_text() for path in Path("kept/said/run").glob("*.screen"))
    assert screens.count("is killed by signal: Killed") >= 2, screens
