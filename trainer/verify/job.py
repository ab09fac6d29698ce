"""The job `verify`: does this strategy train as one process does? Proven on the user's network, data and task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.jobs.preparation import prepare
from trainer.jobs.run_parts import Job, PreparedRun, RunParts
from trainer.launch import failure, rank_output
from trainer.launch.safe_files import make_folder, refuse_unsafe_files, replace_file, resolve_links
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main
from trainer.messages import Refusal, expand_home, format_count, format_names
from trainer.records.run_folder import RunFolder, choose_path
from trainer.verify.cause_experiments import Experiments, collect_facts
from trainer.verify.comparison import TOLERANCES, compare, noise_floors, perturbation_size, tolerances_in
from trainer.verify.loss_plot import plot_curves
from trainer.verify.precision_comparison import (
    PHASES_IN_PRECISION,
    Rounding,
    compare_in_precision,
    curve_noise_floor,
    explain_precision,
    judge_rounding,
    loss_curve,
    narrowing_keys,
)
from trainer.verify.reference import make_reference, read_reference, record_reference
from trainer.verify.short_run import (
    computing_in,
    remove_dropout,
    set_batch_size,
    train_and_record,
    use_single_process,
)
from trainer.verify.training_record import Key, Phase, TrainingRecord
from trainer.verify.verdict import FirstDifference, Verdict, explain_cause, judge

# what a strategy with a curve of its own shares with one process all the same, in the first step
SHARED = (Phase.INITIAL, Phase.DATA, Phase.FORWARD, Phase.LOSS)
Curves = Sequence[Sequence[float]]  # the losses of one process, and of the strategy
Report = Callable[[Verdict, Curves], None]


class Verify(Job):
    """Train a few steps in fp64, in one process and with the strategy, and compare all that is in them."""

    def __init__(
        self,
        steps: int = 3,
        batch: int | None = None,
        tolerance: float = 1e-9,
        reference: str | None = None,
        record: str | None = None,
    ) -> None:
        if steps < 1 or (batch is not None and batch < 1) or not 0 < tolerance < 1:
            raise Refusal("job=verify: job.steps and job.batch are at least 1, job.tolerance lies between 0 and 1")
        self.steps, self.batch, self.tolerance, self.reference, self.record = steps, batch, tolerance, reference, record

    def __call__(self, parts: RunParts) -> int:
        """Compare; the exit code: 0 the same, 1 something differs. Refusal where the run itself would be refused."""
        if self.record is not None:
            return self._write_reference(parts, expand_home(self.record).resolve())
        launch = parts.machine.launch
        out = verify_folder(parts)
        # the reference decides how many samples a step has
        path, reference = out / "reference.safetensors", None
        if self.reference is not None:
            path = expand_home(self.reference)
            reference = read_reference(path, parts, self.steps, self.batch)
        samples = set_batch_size(parts, reference.facts["samples"] if reference else self.batch)
        run, dropped = self._prepare(parts, out / "trial")
        if reference is None:
            # one process before the others: side by side both would need their memory at once
            make_reference(run, samples, path)
            reference = TrainingRecord.read(path)
        rank_output.redirect_output(launch.rank, out)
        report = partial(self._report, run, reference, out, dropped)
        with StopRequest(launch) as stop, run.strategy:
            verdict, curves, done = self._verify_exactly(run, reference, report, stop)
            # then in the precision of the run: there rounding is as large as a mistake is in fp64
            file = path_in_precision(path, run)
            if done and file.is_file() and not verdict.on_purpose:
                verdict, curves, done = self._verify_in_precision(run, verdict, TrainingRecord.read(file), stop)
        if not done:
            return failure.exit_code(False, launch)
        if launch.is_main:
            report(verdict, curves)
            self._remove_folder(run)
        return 0 if verdict.same or verdict.on_purpose else 1

    def _verify_exactly(
        self, run: PreparedRun, reference: TrainingRecord, report: Report, stop: StopRequest
    ) -> tuple[Verdict, Curves, bool]:
        """Collective: the verdict in fp64, with its cause as far as experiments confirm one; both loss curves."""
        record, precision = TrainingRecord(layouts=reference.layouts), reference.facts["precision"]
        tolerances, ends = tolerances_in(precision, self.tolerance), self._ends(run)
        with computing_in(run, precision):
            done = train_and_record(run, record, ends, stop)
            comparison = compare(reference, record, tolerances)
            comparisons = run.strategy.world.all_gather_values(comparison)  # all ranks
            verdict = replace(judge(reference, comparisons, ends[0]), precision=precision)
            if is_on_purpose(verdict.first, run.strategy.own_curve):
                return replace(verdict, on_purpose=True), [loss_curve(reference), loss_curve(record)], done
            curves = [loss_curve(reference), loss_curve(record)]
            if not done or verdict.first is None:
                return verdict, curves, done
            try:
                results = Experiments(run, reference, verdict.first, ends, tolerances, stop).run_all()
            except Exception as error:
                # a mistake may break the experiments as well: what is known is reported before this ends
                if run.strategy.world.is_main:
                    report(replace(verdict, cause=f"not known: an experiment failed, {type(error).__name__}"), curves)
                    self._remove_folder(run)
                raise
        cause = explain_cause(verdict.first, collect_facts(run, record.facts["heard"]), results)
        return replace(verdict, cause=cause, tried=results), curves, done

    def _verify_in_precision(
        self, run: PreparedRun, verdict: Verdict, plain: TrainingRecord, stop: StopRequest
    ) -> tuple[Verdict, Curves, bool]:
        """Collective: the same verdict, with what the precision of the run shows; both curves there."""
        precision, ends = run.machine.resolved_precision, self._ends_in_precision(run)

        def measure(name: str) -> tuple[Rounding, Curves, bool]:
            record = TrainingRecord(phases=PHASES_IN_PRECISION)
            done = train_and_record(run, record, ends, stop, name=name)
            comparison = compare_in_precision(plain, record, precision)
            comparisons = run.strategy.world.all_gather_values(comparison)  # all ranks
            curves = [loss_curve(plain), loss_curve(record)]
            return judge_rounding(precision, plain, comparisons, curves), curves, done

        rounding, curves, done = measure("")
        verdict = replace(verdict, rounding=rounding)
        if verdict.first is None and not rounding.explains:
            narrowing = narrowing_keys(run)
            with computing_in(run, precision):  # is it as it should be, with nothing narrower than that?
                explained = bool(narrowing) and measure("wide")[0].explains
            verdict = replace(verdict, cause=explain_precision(rounding, narrowing if explained else ""))
        return verdict, curves, done

    def _report(
        self, run: PreparedRun, reference: TrainingRecord, out: Path, dropped: int, verdict: Verdict, curves: Curves
    ) -> None:
        """Write the verdict to the screen, verify.json and curves.svg. The main rank calls it."""
        steps, processes = self._ends(run)[-1], run.machine.launch.world_size
        lines = verdict_lines(verdict, run, steps, dropped, reference.facts["because"])
        print("\n".join(lines))
        named = dict(zip(("one process", f"{run.strategy.name} on {processes}"), curves, strict=True))
        content = {"verdict": lines[0], "strategy": run.strategy.name, "processes": processes, "steps": steps}
        content |= {**verdict.data(), "losses": named}
        replace_file(out / "verify.json", json.dumps(content, indent=1) + "\n")
        replace_file(out / "curves.svg", plot_verdict(named, run.arguments, verdict.rounding, verdict.precision))
        print(f"written     {out / 'verify.json'}, and both curves as a picture, curves.svg", flush=True)

    def _write_reference(self, parts: RunParts, path: Path) -> int:
        """Write to a file what one process does, with one micro-batch, and nothing recomputed or compiled."""
        if parts.machine.launch.world_size > 1:
            raise Refusal("job.record: the reference is what one process does; leave out processes and torchrun")
        make_folder(path.parent)
        # the run, on one process
        use_single_process(parts)
        set_batch_size(parts, self.batch or parts.settings.loop.global_batch)
        run, _ = self._prepare(parts, path.parent / f"{path.stem}.trial")
        ends, precision = self._ends_in_precision(run), run.machine.resolved_precision
        path_in_precision(path, run).unlink(missing_ok=True)  # of an earlier one
        with StopRequest(run.machine.launch) as stop, run.strategy:
            record, done = record_reference(run, self._ends(run), self.tolerance, stop)
            # the same in the precision of the run, and with weights moved by a last bit: its noise floors
            plain, perturbed = (TrainingRecord(phases=PHASES_IN_PRECISION) for _ in range(2))
            if done and precision != record.facts["precision"]:
                done = train_and_record(run, plain, ends, stop)
                done = done and train_and_record(run, perturbed, ends, stop, shake=perturbation_size(precision))
        if done and plain.values:
            plain.facts |= {"floor": curve_noise_floor(loss_curve(plain), loss_curve(perturbed), precision)}
            plain.floors = noise_floors(plain, perturbed, TOLERANCES[precision])
            plain.write(path_in_precision(path, run))
        if done:
            record.facts["steps"] = self.steps
            record.write(path)
        self._remove_folder(run)
        return failure.exit_code(done, run.machine.launch)

    def _prepare(self, parts: RunParts, out: Path) -> tuple[PreparedRun, int]:
        """The run as `fit` would prepare it; and how many layers had their dropout switched off."""
        dropped = remove_dropout(parts)
        # a run compares its copies and ends where they differ; here the comparison is to find it
        parts.machine = parts.strategy.machine = replace(parts.machine, compare_copies=False)
        replace(parts.machine, precision="fp64", float8=False).check()
        # a run folder of its own, for what a resume needs: one that is there already is not touched
        parts.open_folder = partial(RunFolder.open_empty, out, parts.machine.launch)
        run = prepare(parts)
        run.sinks = []
        return run, dropped()

    def _remove_folder(self, run: PreparedRun) -> None:
        """Nothing stays of the checkpoint that was resumed from."""
        run.folder.close()
        shutil.rmtree(run.folder.path, ignore_errors=True)

    def _ends(self, run: PreparedRun) -> list[int]:
        """Where the first part of the training ends, and the whole of it."""
        steps = min(self.steps, run.length.steps)
        return [max(1, steps // 2), steps]  # the run is saved and resumed between them

    def _ends_in_precision(self, run: PreparedRun) -> list[int]:
        """The same in the precision of the run: a resume shows nothing new, but of fp16 the scale of losses."""
        return self._ends(run)[0 if run.machine.resolved_precision == "fp16" else -1 :]


def path_in_precision(path: Path, run: PreparedRun) -> Path:
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


def plot_verdict(
    curves: Mapping[str, Sequence[float]], arguments: Sequence[str], rounding: Rounding | None, exact: str
) -> str:
    """Both curves and how far they are apart, in the precision of the run; in the exact one where that is all."""
    precision = rounding.precision if rounding else exact
    smallest = rounding.floor * abs(next(iter(curves.values()))[0]) if rounding else 0.0  # the floor is relative
    title = f"Training loss at every step in {precision}: one process, and the strategy"
    return plot_curves(title, " ".join(["trainer", *arguments]), curves, 1, smallest)


def is_on_purpose(first: FirstDifference | None, own_curve: bool) -> bool:
    """Does this difference come from a curve of its own? Then it begins with a gradient, or later."""
    return own_curve and first is not None and (first.step > 1 or first.phase not in SHARED)


def verdict_lines(verdict: Verdict, run: PreparedRun, steps: int, dropped: int, because: str) -> list[str]:
    """The verdict, as it stands on the screen. because: why it is none in fp64."""
    what = f"{run.strategy.name} on {run.machine.launch.world_size}"
    compared, called = verdict.modules
    modules = f"{compared} of {format_count(called, 'module')}"
    if verdict.left_out:
        modules += f" (not {format_names(verdict.left_out, 3)})"
    lines = [f"compared    {modules}, all gradients, weights and optimizer states"]
    lines.append(f"samples     {run.settings.loop.global_batch} in a step (job.batch)")
    if dropped:
        lines.append(f"note        {format_count(dropped, 'dropout layer')} switched off, here and in the reference")
    if because:
        lines.append(f"note        it does not compute in fp64 ({because}): compared in fp32, where less is seen")
    gap = f"{verdict.precision} gap {verdict.gap:.1e}"
    rounding = f"; {verdict.rounding}" if verdict.rounding else ""
    if verdict.same:
        return [f"SAME: {what}, {format_count(steps, 'step')}, {gap}{rounding}", *lines]
    if verdict.on_purpose:
        shared = "initial values, samples, forward and loss of step 1 are those of one process"
        return [f"OWN CURVE: {what}, on purpose; {shared}. First other at {describe_first(verdict)}", *lines]
    if verdict.first is None:
        assert verdict.rounding is not None
        if there := verdict.rounding.first:
            where = f"{Key(there.step, there.phase, there.name)}, {there.gap:.1e} (noise floor {there.floor:.1e})"
        else:
            where = f"forward, {verdict.rounding.wider}, in wider numbers than on one process"
        headline = f"DIFFERS in its precision alone: {what}, {gap}{rounding}; first at {where}; cause: {verdict.cause}"
        return [headline, *lines]
    lines += [f"then        {place}" for place in verdict.others]
    return [f"DIFFERS at {describe_first(verdict)}; cause: {verdict.cause}", *lines]


def describe_first(verdict: Verdict) -> str:
    """Where the first difference is, in words: what, on whom, how much."""
    first = verdict.first
    assert first is not None
    who = ", which one process does not have" if first.extra else ""
    if not first.ranks:
        who = ", which no rank has"
    elif first.others:
        who = f", {'samples of ' if first.phase == Phase.FORWARD else ''}rank {', '.join(map(str, first.ranks))}"
    return f"{Key(first.step, first.phase, first.name)}{who}, {first.gap:.1e}"
