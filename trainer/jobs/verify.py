"""The job `verify`: does this strategy train as one process does? Proven on the user's network, data and task."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.counted import counted
from trainer.home import at_home
from trainer.jobs.experiments import Experiments
from trainer.jobs.preparation import Job, Prepared, RunParts, prepare
from trainer.jobs.reference import made_apart
from trainer.jobs.trial import exactly, named_modules, plainly, surveyed, trial, without_dropout
from trainer.launch import failure, screen
from trainer.launch.agreement import decided_by_main
from trainer.launch.durable import replace_file
from trainer.launch.nofollow import make_folder, real, refuse_strange
from trainer.launch.signals import StopRequest
from trainer.proof.causes import Circumstances, First, likely
from trainer.proof.comparison import EXACTNESS, Exactness, compared, floors
from trainer.proof.picture import picture
from trainer.proof.record import Key, Record
from trainer.proof.rounding import COMPARED, Rounding, compared_there, floor, losses, rounded, shake
from trainer.proof.verdict import Verdict, difference, judged, spoken
from trainer.records.folder import RunFolder, choose
from trainer.refusal import Refusal


class Verify(Job):
    """Train a few steps in fp64, in one process and with the strategy, and compare all that is in them."""

    def __init__(
        self, steps: int = 3, tolerance: float = 1e-9, reference: str | None = None, record: str | None = None
    ) -> None:
        if steps < 1 or not 0 < tolerance < 1:
            raise Refusal("job=verify: job.steps is at least 1, job.tolerance lies between 0 and 1")
        self.steps, self.tolerance, self.reference, self.record = steps, tolerance, reference, record

    def __call__(self, parts: RunParts) -> int:
        """Compare; the exit code: 0 the same, 1 something differs. Refusal where the run itself would be refused."""
        if self.record is not None:
            return self._write(parts, Path(self.record).resolve())
        launch = parts.machine.launch
        out = verify_folder(parts)
        run, dropped = self._prepared(parts, out / "trial")
        # one process before the others: side by side both would need their memory at once
        path = Path(self.reference) if self.reference else out / "reference.safetensors"
        if self.reference is None:
            decided_by_main(launch, "reference", lambda: made_apart(parts.words, path))
        elif not path.is_file():
            raise Refusal(f"job.reference={self.reference}: there is no such file; job.record={path} writes it")
        reference = Record.read(path)
        screen.redirect(launch.rank, out)
        record = Record(layouts=reference.layouts)
        with StopRequest(launch) as stop, run.strategy:
            world, exact = run.strategy.world, reference.facts["precision"]
            with exactly(run, exact):
                done = trial(run, record, self._ends(run), stop)
                own = compared(reference, record, self._exactness(exact))
                verdict = judged(reference, world.all_gather_values(own), self._ends(run)[0])  # all ranks
                if done and verdict.first is not None:
                    verdict = self._explained(verdict, verdict.first, run, reference, record, stop)
            curves, rounding = [losses(reference), losses(record)], None
            # then as the run itself would compute: there rounding is what a mistake was before
            file = beside(path, run)
            plain = Record.read(file) if file.is_file() else None
            if done and plain:
                spread = Record()
                done = trial(run, spread, self._ends(run)[-1:], stop)
                curves, precision = [losses(plain), losses(spread)], run.machine.resolved_precision
                there = world.all_gather_values(compared_there(plain, spread, precision))  # all ranks
                rounding = rounded(precision, plain, there, curves)
        if not done:
            return failure.exit_code(False, launch)
        verdict = replace(verdict, rounding=rounding, precision=exact)
        if launch.is_main:
            steps = self._ends(run)[-1]
            told = lines(verdict, run, steps, dropped, reference.facts["because"])
            print("\n".join(told))
            said = {"verdict": told[0], "strategy": run.strategy.name, "processes": launch.world_size, "steps": steps}
            both = dict(zip(("one process", f"{run.strategy.name} on {launch.world_size}"), curves, strict=True))
            said |= {**verdict.data(), "losses": both}
            replace_file(out / "verify.json", json.dumps(said, indent=1) + "\n")
            replace_file(out / "curves.svg", drawn(both, parts.words, rounding, exact))
            print(f"written     {out / 'verify.json'}, and both curves as a picture, curves.svg")
            self._leave(run)
        return 0 if verdict.same else 1

    def _explained(
        self, verdict: Verdict, first: First, run: Prepared, reference: Record, record: Record, stop: StopRequest
    ) -> Verdict:
        """Collective: the same verdict with its cause, as far as experiments confirm one."""
        if run.strategy.world.is_main:  # what is known, should an experiment fail
            print(f"DIFFERS at {difference(verdict)}; trying what causes it", file=sys.stderr, flush=True)
        exact = self._exactness(reference.facts["precision"])
        tried = Experiments(run, reference, first, self._ends(run), exact, stop).tried()
        here = circumstances(run, record.facts["heard"])
        return replace(verdict, cause=likely(first, here, tried), tried=tried)

    def _write(self, parts: RunParts, path: Path) -> int:
        """Write to a file what one process does, with one micro-batch, and nothing recomputed or compiled."""
        if parts.machine.launch.world_size > 1:
            raise Refusal("job.record: the reference is what one process does; leave out processes and torchrun")
        make_folder(path.parent)
        run, _ = self._prepared(parts, path.parent / f"{path.stem}.trial", alone=True)
        last, precision = self._ends(run)[-1], run.machine.resolved_precision
        beside(path, run).unlink(missing_ok=True)  # of an earlier one
        with StopRequest(run.machine.launch) as stop, run.strategy:
            record, done = self._reference(run, stop)
            plain, moved = Record(), Record()
            if done and precision != record.facts["precision"]:
                done = trial(run, plain, [last], stop) and trial(run, moved, [last], stop, shake=shake(precision))
        if done and plain.values:
            plain.facts = {"floor": floor(losses(plain), losses(moved), precision)}
            plain.floors = floors(plain, moved, EXACTNESS[precision])
            plain.only(COMPARED).write(beside(path, run))
        if done:
            record.write(path)
        self._leave(run)
        return failure.exit_code(done, run.machine.launch)

    def _reference(self, run: Prepared, stop: StopRequest) -> tuple[Record, bool]:
        """What one process does in fp64, or in fp32 where it cannot; False: somebody asked to stop."""
        try:
            return self._twice(run, stop, "fp64", "")
        except (RuntimeError, TypeError, ValueError) as error:
            because = f"{error}".strip().partition("\n")[0]
            if "out of memory" in because or "can't allocate memory" in because:
                raise
        # what fails here as well is no question of the precision
        return self._twice(run, stop, "fp32", because)

    def _twice(self, run: Prepared, stop: StopRequest, precision: str, because: str) -> tuple[Record, bool]:
        """All of it twice, the second time with all weights moved by a last bit: so far does rounding alone carry it.

        because: why it is not done in a wider precision.
        """
        half, last = self._ends(run)
        with exactly(run, precision):
            layouts = surveyed(run)
            record, shaken = Record(layouts=layouts), Record(layouts=layouts)
            done = trial(run, record, [last], stop, resume=half)
            done = done and trial(run, shaken, [last], stop, resume=half, shake=shake(precision))
        record.floors = floors(record, shaken, self._exactness(precision)) if done else {}
        record.facts = {"precision": precision, "because": because}
        return record, done

    def _exactness(self, precision: str) -> Exactness:
        """What counts as rounding there; of fp64 the tolerance is a key of the job."""
        exact = EXACTNESS[precision]
        return exact._replace(tolerance=self.tolerance) if precision == "fp64" else exact

    def _prepared(self, parts: RunParts, out: Path, alone: bool = False) -> tuple[Prepared, int]:
        """All that happens before there is a process group; and how many layers drop nothing for the comparison.

        alone: on one process as it is, whatever the words say.
        """
        dropped = without_dropout(parts)
        if alone:
            plainly(parts)
        # what differs is to be named by what comes, not by what guards a run
        parts.machine = parts.strategy.machine = replace(parts.machine, compare_copies=False)
        replace(parts.machine, precision="fp64").check()
        # a run folder of its own, for what a resume needs: one that is there already is not touched
        parts.open_folder = partial(RunFolder.anew, out, parts.machine.launch)
        run = prepare(parts)
        run.sinks = []
        return run, dropped()

    def _leave(self, run: Prepared) -> None:
        """Nothing stays of the checkpoint that was resumed from."""
        run.folder.close()
        shutil.rmtree(run.folder.path, ignore_errors=True)

    def _ends(self, run: Prepared) -> list[int]:
        """Where the first part of the training ends, and the whole of it."""
        steps = min(self.steps, run.length.steps)
        return [max(1, steps // 2), steps]


def beside(path: Path, run: Prepared) -> Path:
    """Where the reference in the precision of the run lies: beside that in fp64."""
    return path.with_suffix(f".{run.machine.resolved_precision}{path.suffix}")


def verify_folder(parts: RunParts) -> Path:
    """The job's own folder, below that of the run that is meant; where that has no name one is made."""
    run, launch = parts.settings.run, parts.machine.launch

    def decide() -> str:
        folder, _ = choose(at_home(run.root), run.name, run.dir, f"verify_{parts.strategy.name}", launch)
        refuse_strange(make_folder(real(folder) / "verify"))
        (folder / "verify" / "verify.json").unlink(missing_ok=True)  # of an earlier one, should this one be killed
        return str(folder / "verify")

    return real(decided_by_main(launch, "verify-folder", decide))


def circumstances(run: Prepared, strays: Collection[str]) -> Circumstances:
    """What else is known of the training that is compared."""
    return Circumstances(
        data_ranks=run.strategy.data_group.size,
        micro_batches=run.batches.micro_batches,
        planned=run.strategy.world.size > run.strategy.data_group.size,
        native=run.strategy.dropout == "native",
        kinds=named_modules(run.network),
        strays=strays,
    )


def drawn(curves: Mapping[str, Sequence[float]], words: Sequence[str], rounding: Rounding | None, exact: str) -> str:
    """Both curves and how far they are apart, in the precision of the run; in the exact one where that is all."""
    precision = rounding.precision if rounding else exact
    smallest = rounding.floor * abs(next(iter(curves.values()))[0]) if rounding else 0.0  # the floor is relative
    title = f"Training loss at every step in {precision}: one process, and the strategy"
    return picture(title, " ".join(["trainer", *words]), curves, 1, smallest)


def narrow(run: Prepared) -> str:
    """The likely cause where fp64 is the same, and the precision of the run is not."""
    own = [f"strategy.{name}={value}" for name in run.strategy.narrowing if (value := getattr(run.strategy, name))]
    precision = run.machine.resolved_precision
    if own:
        return f"{' '.join(own)}, which is narrower than precision={precision}"
    return f"rounding: sums in {precision} that the strategy takes in another order, or a part that is narrower than it"


def lines(verdict: Verdict, run: Prepared, steps: int, dropped: int, because: str) -> list[str]:
    """The verdict, as it stands on the screen. because: why it is none in fp64."""
    what = f"{run.strategy.name} on {run.machine.launch.world_size}"
    compared, called = verdict.modules
    told = [f"compared    {compared} of {counted(called, 'module')}, all gradients, weights and optimizer states"]
    if dropped:
        told.append(f"note        {counted(dropped, 'dropout layer')} switched off, here and in the reference")
    if because:
        told.append(f"note        it does not compute in fp64 ({because}): compared in fp32, where less is seen")
    gap = f"{verdict.precision} gap {verdict.gap:.1e}"
    rounding = f"; {verdict.rounding}" if verdict.rounding else ""
    if verdict.same:
        return [f"SAME: {what}, {counted(steps, 'step')}, {gap}{rounding}", *told]
    if verdict.first is None:
        there = verdict.rounding.first if verdict.rounding else None
        assert there is not None
        where = f"{spoken(Key(there.step, there.phase, there.name))}, {there.gap:.1e} (noise floor {there.floor:.1e})"
        return [
            f"DIFFERS in its precision alone: {what}, {gap}{rounding}; first at {where}; likely: {narrow(run)}",
            *told,
        ]
    told += [f"then        {one}" for one in verdict.others]
    return [f"DIFFERS at {difference(verdict)}; cause: {verdict.cause}", *told]
