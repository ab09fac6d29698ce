"""The job `verify`: does this strategy train as one process does? Proven on the user's network, data and task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from trainer.jobs.preparation import prepare
from trainer.jobs.run_parts import Job, PreparedRun, RunParts
from trainer.launch import failure, rank_output
from trainer.launch.safe_files import make_folder, refuse_unsafe_files, replace_file, resolve_links
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main
from trainer.messages import Refusal, expand_home, format_count
from trainer.records.run_folder import RunFolder, choose_path
from trainer.verify.cause_experiments import Experiments
from trainer.verify.causes import Circumstances, likely
from trainer.verify.comparison import (
    COMPARED,
    EXACTNESS,
    Rounding,
    compared,
    compared_there,
    exactness,
    floor,
    floors,
    losses,
    rounded,
    shake,
)
from trainer.verify.fewer_layers import Fewer, fewer_layers, short_of, shortened, shorter_lines
from trainer.verify.reference import SMALLER, given, have_made, how_few, recorded, shortage
from trainer.verify.short_run import (
    exactly,
    named_modules,
    plainly,
    trial,
    with_batch,
    without_dropout,
)
from trainer.verify.training_record import Key, Record
from trainer.verify.verdict import Verdict, difference, judged, picture, spoken

Curves = Sequence[Sequence[float]]  # the losses of one process, and of the strategy
Tell = Callable[[Verdict, Curves], None]


class Verify(Job):
    """Train a few steps in fp64, in one process and with the strategy, and compare all that is in them."""

    def __init__(
        self,
        steps: int = 3,
        batch: int | None = None,
        tolerance: float = 1e-9,
        reference: str | None = None,
        record: str | None = None,
        layers: int | Literal["all"] | None = None,
    ) -> None:
        counts = [count for count in (steps, batch, layers) if isinstance(count, int)]
        if min(counts) < 1 or not 0 < tolerance < 1:
            raise Refusal(
                "job=verify: job.steps, job.batch and job.layers are at least 1, job.tolerance lies between 0 and 1"
            )
        self.steps, self.batch, self.tolerance, self.reference, self.record = steps, batch, tolerance, reference, record
        self.layers = layers

    def __call__(self, parts: RunParts) -> int:
        """Compare; the exit code: 0 the same, 1 something differs. Refusal where the run itself would be refused."""
        if self.record is not None:
            return self._write(parts, Path(self.record).resolve())
        launch = parts.machine.launch
        out = verify_folder(parts)
        path, reference = out / "reference.safetensors", None
        if self.reference is not None:
            path = Path(self.reference)
            reference = given(path)
        samples = with_batch(parts, reference.facts.get("samples") if reference else self.batch)
        run, dropped = self._prepared(parts, out / "trial")
        if reference is None:
            # one process before the others: side by side both would need their memory at once
            why = have_made(run, samples, path, self.layers)
            reference = Record.read(path)
            reference.facts["shorter"] = why or reference.facts["shorter"]
        run = shortened(run, map(Fewer.read, reference.facts["fewer"]))
        rank_output.redirect_output(launch.rank, out)
        tell = partial(self._tell, run, reference, out, dropped)
        with StopRequest(launch) as stop, run.strategy:
            verdict, curves, done = self._exactly(run, reference, tell, stop)
            # then as the run itself would compute: there rounding is what a mistake was before
            file = beside(path, run)
            if done and file.is_file():
                verdict, curves, done = self._in_precision(run, verdict, Record.read(file), stop)
        if not done:
            return failure.exit_code(False, launch)
        if launch.is_main:
            tell(verdict, curves)
            self._leave(run)
        return 0 if verdict.same else 1

    def _exactly(
        self, run: PreparedRun, reference: Record, tell: Tell, stop: StopRequest
    ) -> tuple[Verdict, Curves, bool]:
        """Collective: the verdict in fp64, with its cause as far as experiments confirm one; both curves."""
        record, precision = Record(layouts=reference.layouts), reference.facts["precision"]
        exact, ends = exactness(precision, self.tolerance), self._ends(run)
        with exactly(run, precision):
            done = trial(run, record, ends, stop)
            found = run.strategy.world.all_gather_values(compared(reference, record, exact))  # all ranks
            verdict, curves = replace(judged(reference, found, ends[0]), precision=precision), both(reference, record)
            if not done or verdict.first is None:
                return verdict, curves, done
            try:
                tried = Experiments(run, reference, verdict.first, ends, exact, stop).tried()
            except Exception as error:
                # a mistake may break what is tried to find it: what is known is told before this ends
                if run.strategy.world.is_main:
                    tell(replace(verdict, cause=f"not known: an experiment failed, {type(error).__name__}"), curves)
                    self._leave(run)
                raise
        cause = likely(verdict.first, circumstances(run, record.facts["heard"]), tried)
        return replace(verdict, cause=cause, tried=tried), curves, done

    def _in_precision(
        self, run: PreparedRun, verdict: Verdict, plain: Record, stop: StopRequest
    ) -> tuple[Verdict, Curves, bool]:
        """Collective: the same verdict, with what the precision of the run shows; both curves there."""
        precision, ends = run.machine.resolved_precision, self._narrow_ends(run)

        def shown(name: str) -> tuple[Rounding, Curves, bool]:
            spread = Record(phases=COMPARED)
            done = trial(run, spread, ends, stop, name=name)
            found = run.strategy.world.all_gather_values(compared_there(plain, spread, precision))  # all ranks
            return rounded(precision, plain, found, both(plain, spread)), both(plain, spread), done

        rounding, curves, done = shown("")
        verdict = replace(verdict, rounding=rounding)
        if verdict.first is None and not rounding.explains:
            narrowing = narrow(run)
            with exactly(run, precision):  # is it as it should be, with nothing narrower than that?
                mended = bool(narrowing) and shown("wide")[0].explains
            verdict = replace(verdict, cause=unexplained(precision, narrowing if mended else ""))
        return verdict, curves, done

    def _tell(
        self, run: PreparedRun, reference: Record, out: Path, dropped: int, verdict: Verdict, curves: Curves
    ) -> None:
        """The main rank's: the verdict on the screen and in files."""
        steps, processes = self._ends(run)[-1], run.machine.launch.world_size
        told = lines(verdict, run, steps, dropped, reference.facts["because"])
        facts = {name: reference.facts[name] for name in ("fewer", "shorter")}
        told += shorter_lines([*map(Fewer.read, facts["fewer"])], facts["shorter"])
        print("\n".join(told))
        said = {"verdict": told[0], "strategy": run.strategy.name, "processes": processes, "steps": steps}
        named = dict(zip(("one process", f"{run.strategy.name} on {processes}"), curves, strict=True))
        said |= {**verdict.data(), **facts, "losses": named}
        replace_file(out / "verify.json", json.dumps(said, indent=1) + "\n")
        replace_file(out / "curves.svg", drawn(named, run.arguments, verdict.rounding, verdict.precision))
        print(f"written     {out / 'verify.json'}, and both curves as a picture, curves.svg", flush=True)

    def _write(self, parts: RunParts, path: Path) -> int:
        """Write to a file what one process does, with one micro-batch, and nothing recomputed or compiled."""
        if parts.machine.launch.world_size > 1:
            raise Refusal("job.record: the reference is what one process does; leave out processes and torchrun")
        make_folder(path.parent)
        plainly(parts)
        with_batch(parts, self.batch or parts.settings.loop.global_batch)
        run, _ = self._prepared(parts, path.parent / f"{path.stem}.trial")
        layers, why = how_few(run, self.layers, least=2)
        fewer = fewer_layers(run, layers) if layers else []
        run = shortened(run, fewer)
        if self.layers != "all" and (still := shortage(run, largest=1.0)):
            self._leave(run)
            raise Refusal(f"job=verify: one process cannot hold it{short_of(fewer)}: {still}. {SMALLER}")
        ends, precision = self._narrow_ends(run), run.machine.resolved_precision
        beside(path, run).unlink(missing_ok=True)  # of an earlier one
        with StopRequest(run.machine.launch) as stop, run.strategy:
            record, done = recorded(run, self._ends(run), self.tolerance, stop)
            plain, moved = Record(phases=COMPARED), Record(phases=COMPARED)
            if done and precision != record.facts["precision"]:
                done = trial(run, plain, ends, stop) and trial(run, moved, ends, stop, shake=shake(precision))
        if done and plain.values:
            plain.facts = {"floor": floor(losses(plain), losses(moved), precision)}
            plain.floors = floors(plain, moved, EXACTNESS[precision])
            plain.write(beside(path, run))
        if done:
            record.facts |= {"fewer": [asdict(own) for own in fewer], "shorter": why}
            record.write(path)
        self._leave(run)
        return failure.exit_code(done, run.machine.launch)

    def _prepared(self, parts: RunParts, out: Path) -> tuple[PreparedRun, int]:
        """All that happens before there is a process group; and how many layers drop nothing for the comparison."""
        dropped = without_dropout(parts)
        # what differs is to be named by what comes, not by what guards a run
        parts.machine = parts.strategy.machine = replace(parts.machine, compare_copies=False)
        replace(parts.machine, precision="fp64").check()
        # a run folder of its own, for what a resume needs: one that is there already is not touched
        parts.open_folder = partial(RunFolder.open_empty, out, parts.machine.launch)
        run = prepare(parts)
        run.sinks = []
        return run, dropped()

    def _leave(self, run: PreparedRun) -> None:
        """Nothing stays of the checkpoint that was resumed from."""
        run.folder.close()
        shutil.rmtree(run.folder.path, ignore_errors=True)

    def _ends(self, run: PreparedRun) -> list[int]:
        """Where the first part of the training ends, and the whole of it."""
        steps = min(self.steps, run.length.steps)
        return [max(1, steps // 2), steps]

    def _narrow_ends(self, run: PreparedRun) -> list[int]:
        """The same in the precision of the run: a resume shows nothing new, but of fp16 the scale of losses."""
        return self._ends(run)[0 if run.machine.resolved_precision == "fp16" else -1 :]


def beside(path: Path, run: PreparedRun) -> Path:
    """Where the reference in the precision of the run lies: beside that in fp64."""
    return path.with_suffix(f".{run.machine.resolved_precision}{path.suffix}")


def verify_folder(parts: RunParts) -> Path:
    """The job's own folder, below that of the run that is meant; where that has no name one is made."""
    run, launch = parts.settings.run, parts.machine.launch

    def decide() -> str:
        folder, _ = choose_path(expand_home(run.root), run.name, run.dir, f"verify_{parts.strategy.name}", launch)
        refuse_unsafe_files(make_folder(resolve_links(folder) / "verify"))
        (folder / "verify" / "verify.json").unlink(missing_ok=True)  # of an earlier one, should this one be killed
        return str(folder / "verify")

    return resolve_links(broadcast_from_main(launch, "verify-folder", decide))


def circumstances(run: PreparedRun, strays: Collection[str]) -> Circumstances:
    """What else is known of the training that is compared."""
    return Circumstances(
        data_ranks=run.strategy.data_group.size,
        micro_batches=run.batches.micro_batches,
        planned=run.strategy.world.size > run.strategy.data_group.size,
        native=run.strategy.dropout == "native",
        kinds=named_modules(run.network),
        strays=strays,
        stepping=foreign_optimizer(run) if run.sharded else "",
    )


def foreign_optimizer(run: PreparedRun) -> str:
    """The class of the optimizer, where it is not one of torch's."""
    kind = type(run.make_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}]))
    return "" if kind.__module__.startswith("torch.") else kind.__name__


def drawn(curves: Mapping[str, Sequence[float]], words: Sequence[str], rounding: Rounding | None, exact: str) -> str:
    """Both curves and how far they are apart, in the precision of the run; in the exact one where that is all."""
    precision = rounding.precision if rounding else exact
    smallest = rounding.floor * abs(next(iter(curves.values()))[0]) if rounding else 0.0  # the floor is relative
    title = f"Training loss at every step in {precision}: one process, and the strategy"
    return picture(title, " ".join(["trainer", *words]), curves, 1, smallest)


def both(reference: Record, record: Record) -> Curves:
    """The curves of both."""
    return [losses(reference), losses(record)]


def narrow(run: PreparedRun) -> str:
    """What of the strategy is narrower than the precision of the run, as its keys say."""
    return " ".join(
        f"strategy.{name}={value}" for name in run.strategy.narrowing if (value := getattr(run.strategy, name))
    )


def unexplained(precision: str, narrowing: str) -> str:
    """The cause where fp64 is the same, and the precision of the run is not. narrowing: keys without which it is."""
    if narrowing:
        return f"{narrowing}, which is narrower than precision={precision}; without it the strategy trains the same"
    return (
        f"not known: in fp64 the strategy trains the same. Something in it is narrower than {precision}, or scales"
        f" otherwise there; or sums in {precision} in another order are more than this network bears"
    )


def lines(verdict: Verdict, run: PreparedRun, steps: int, dropped: int, because: str) -> list[str]:
    """The verdict, as it stands on the screen. because: why it is none in fp64."""
    what = f"{run.strategy.name} on {run.machine.launch.world_size}"
    compared, called = verdict.modules
    told = [f"compared    {compared} of {format_count(called, 'module')}, all gradients, weights and optimizer states"]
    told.append(f"samples     {run.settings.loop.global_batch} in a step (job.batch)")
    if dropped:
        told.append(f"note        {format_count(dropped, 'dropout layer')} switched off, here and in the reference")
    if because:
        told.append(f"note        it does not compute in fp64 ({because}): compared in fp32, where less is seen")
    gap = f"{verdict.precision} gap {verdict.gap:.1e}"
    rounding = f"; {verdict.rounding}" if verdict.rounding else ""
    if verdict.same:
        return [f"SAME: {what}, {format_count(steps, 'step')}, {gap}{rounding}", *told]
    if verdict.first is None:
        there = verdict.rounding.first if verdict.rounding else None
        assert there is not None
        where = f"{spoken(Key(there.step, there.phase, there.name))}, {there.gap:.1e} (noise floor {there.floor:.1e})"
        return [
            f"DIFFERS in its precision alone: {what}, {gap}{rounding}; first at {where}; cause: {verdict.cause}",
            *told,
        ]
    told += [f"then        {one}" for one in verdict.others]
    return [f"DIFFERS at {difference(verdict)}; cause: {verdict.cause}", *told]
