"""The command scripts/chaos: one configuration trained twice, undisturbed and while faults strike; what differs."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import chain, islice, repeat
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open

from scripts.faults import inside, shm
from scripts.faults.driven import Driven, Stuck
from scripts.faults.strikes import STRIKES, checkpoints
from tests.run import Command, lines
from trainer import Refusal
from trainer.configuration.compose import compose

COPIES = ("ddp", "zero1", "hsdp", "ddp_tp", "ddp_pp")  # strategies whose ranks keep copies of the same weights
QUIET, RUN, SAID = "undisturbed", "run", "said"  # the folders of the runs; what stood on the screen, for each
# every step is compared; a rank that hangs would cost ten minutes
DEFAULTS = ("loop.log_every=1", "distributed.step_timeout=10")


def main(words: Sequence[str] | None = None) -> int:
    """Print what became of the run; 0: nothing was lost and nothing is left, 1: something, 2: the words cannot work."""
    asked, others = arguments().parse_known_args(words)
    before = shm.names()
    try:
        with place(asked.keep) as folder:
            quiet, run = both(asked, others, folder)
            wrong, steps = differences(run.folder, quiet.folder), quiet.step()
    except (Refusal, Stuck) as error:
        print(f"scripts/chaos: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refusal) else 1
    outlived = quiet.outlived + run.outlived
    wrong += [f"{outlived} processes did not end with their command"] if outlived else []
    wrong += [f"left behind: {name}" for name in (*quiet.litter, *run.litter, *shm.left(before))]
    again = sum(blow.again for blow in run.blows)
    print(*table(run), sep="\n")
    print(f"faults      {len(run.blows)}, healed by {run.starts - 1} times the same command")
    print(f"steps       {steps}, and {again} of them again: goodput {steps / (steps + again):.3f}")
    print(f"seconds     {run.seconds:.0f}, undisturbed {quiet.seconds:.0f}: goodput {quiet.seconds / run.seconds:.3f}")
    same = ["the same    every loss to the bit, evaluations, weights, optimizer; nothing is left behind"]
    print(*([f"differs     {one}" for one in wrong] or same), sep="\n")
    return 1 if wrong else 0


def arguments() -> argparse.ArgumentParser:
    """The options; every other word is for the run."""
    kinds = "\n".join(f"  {kind:<14} {what}" for kind, (what, _) in STRIKES.items())
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        usage="%(prog)s [options] [words of the run]",
        description="Train while faults strike, and compare with a run that nothing happened to.",
        epilog=f"kinds of faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the list of faults; default: 0")
    parser.add_argument("--every", type=int, default=50, help="steps from one fault to the next; default: 50")
    parser.add_argument("--faults", type=int, help="or: how many")
    parser.add_argument("--kinds", help="separated by commas; default: all that can strike this run")
    parser.add_argument("--processes", type=int, default=1, help="default: 1")
    parser.add_argument("--keep", type=Path, help="a new folder for both runs and all they said; default: removed")
    return parser


def both(asked: Namespace, words: Sequence[str], folder: Path) -> tuple[Driven, Driven]:
    """The undisturbed run, and the one that faults strike.

    Refusal where the words cannot work, Stuck where the same command again does not heal the run.
    """
    kinds = asked.kinds.split(",") if asked.kinds else list(STRIKES)
    if unknown := [kind for kind in kinds if kind not in STRIKES]:
        raise Refusal(f"--kinds: there is no {', '.join(unknown)}; there are {', '.join(STRIKES)}")
    if chosen := [word for word in words if word.startswith(("run.", "processes="))]:
        raise Refusal(f"{chosen[0]}: the folder is chosen here, and --processes says how many; leave it out")
    cfg = compose(words)
    inside.write(folder, cfg.task._target_)
    # what strikes inside is part of both runs, or they would not have one configuration
    added = [f"task._target_={inside.TASK}", f"trust=[{','.join([*cfg.trust, inside.PACKAGE])}]"]
    defaults = [word for word in DEFAULTS if not any(one.startswith(word.split("=")[0]) for one in words)]

    def driven(name: str) -> Driven:
        own = [*words, *defaults, *added, f"run.dir={folder / name}", f"processes={asked.processes}"]
        # in the user's own folder, though what it leaves there besides the run lies in that of the chaos
        command = ["sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), sys.executable, "-m", "trainer", *own]
        environment = {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", inside.FOLDER: str(folder)}
        again = partial(Command, command, folder / SAID / name, environment)
        return Driven(again, asked.processes, folder / name, folder, Random(asked.seed))

    quiet, run = driven(QUIET), driven(RUN)
    quiet.run()
    alone = "only one process" if asked.processes == 1 else ""
    strategy = quiet.status()["strategy"]
    reasons = {
        "kill_launcher": alone,
        "stop": alone and f"{alone}: nobody waits for it",
        "kill_worker": "" if quiet.workers else "no data workers: they need loader.workers and a set read by items",
        "flip": "" if cfg.loop.save_every is not None else "loop.save_every=null",
        "nan": "" if cfg.loop.on_nonfinite == "stop" else "loop.on_nonfinite changes the curve on purpose",
        "drift": alone or ("" if strategy in COPIES else f"{strategy}: no rank has a copy to compare with"),
    }
    for kind in kinds:
        if why := reasons.get(kind):
            print(f"left out    {kind}: {why}")
    possible = [kind for kind in kinds if not reasons.get(kind)]
    count = asked.faults if asked.faults is not None else quiet.step() // asked.every
    run.run(draw(quiet.step(), count, possible, asked.seed) if possible else [])
    return quiet, run


def draw(steps: int, count: int, kinds: Sequence[str], seed: int) -> list[tuple[int, str]]:
    """(step, kind) of so many faults, about equally far apart; every kind strikes before one strikes again."""
    random, apart = Random(seed), steps / max(1, count)
    rounds = chain.from_iterable(random.sample(list(one), len(one)) for one in repeat(kinds))
    # the middle half of each stretch: two faults are never closer than half a stretch, and the last is not at the end
    places = [int(apart * (number + random.uniform(0.25, 0.75))) for number in range(count)]
    return [(max(1, step), kind) for step, kind in zip(places, islice(rounds, count), strict=True)]


def differences(run: Path, undisturbed: Path) -> list[str]:
    """What the two runs do not have in common: losses and samples by step, evaluations, weights; empty: nothing."""
    ours, theirs = lines(run, "train"), lines(undisturbed, "train")
    steps = Counter(line["step"] for line in ours)
    found = [f"step {step} stands there {times} times" for step, times in steps.items() if times > 1]
    for key in ("loss_hex", "sample_digest"):
        one, other = ({line["step"]: line[key] for line in said} for said in (ours, theirs))
        apart = sorted(step for step in one.keys() | other.keys() if one.get(step) != other.get(step))
        if apart:
            found.append(f"{key} of {len(apart)} of {len(other)} steps differs or is missing, from step {apart[0]} on")
    if lines(run, "eval") != lines(undisturbed, "eval"):
        found.append("the evaluations differ")
    wrong = sorted({name for name, _ in (tensors(run) ^ tensors(undisturbed))})
    return found + [f"{len(wrong)} tensors of the last checkpoint differ, first {name}" for name in wrong[:1]]


def tensors(folder: Path) -> set[tuple[str, str]]:
    """Name and SHA-256 of all tensors of the last checkpoint: in which file each is, and who wrote it, is no matter."""
    found = set()
    for file in checkpoints(folder)[-1].glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                one = opened.get_tensor(name)
                bits = one.reshape(-1).view(torch.uint8).numpy().tobytes()
                found.add((name, sha256(f"{one.dtype} {[*one.shape]}".encode() + bits).hexdigest()))
    return found


def table(run: Driven) -> list[str]:
    """By kind of fault: how often, the median of the seconds lost, and the steps that were done twice, in sum."""
    rows = [f"{'fault':<14} times   lost  steps again"]
    for kind in sorted({blow.kind for blow in run.blows}):
        own = [blow for blow in run.blows if blow.kind == kind]
        lost, again = median(blow.lost for blow in own), sum(blow.again for blow in own)
        rows.append(f"{kind:<14} {len(own):>5} {lost:>6.1f} {again:>12}")
    return rows


@contextmanager
def place(keep: Path | None) -> Iterator[Path]:
    """A folder that is removed at the end, also when this program is asked to stop; a copy stays where it was asked."""
    asks = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in asks}
    with TemporaryDirectory(prefix="chaos-") as folder:
        try:
            yield Path(folder)
        finally:
            if keep is not None:
                shutil.copytree(folder, keep)
            for number, handler in before.items():
                signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
