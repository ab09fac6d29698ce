"""What faults have cost, and whether the run can be told from one that nothing happened to: as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from scripts.faults.blow import PHASES, Blow, Survived
from scripts.faults.driven import Driven
from scripts.faults.left import Left


def differences(run: Left, undisturbed: Left) -> list[str]:
    """What the two runs do not have in common: losses and samples by step, evaluations, weights; empty: nothing."""
    ours, theirs = run.lines(), undisturbed.lines()
    steps = [line["step"] for line in ours]
    found = [f"step {step} stands there {times} times" for step, times in Counter(steps).items() if times > 1]
    for key in ("loss_hex", "sample_digest"):
        one, other = ({line["step"]: line[key] for line in lines} for lines in (ours, theirs))
        apart = sorted(step for step in one.keys() | other.keys() if one.get(step) != other.get(step))
        if apart:
            found.append(f"{key} of {len(apart)} of {len(other)} steps differs or is missing, from step {apart[0]} on")
    if run.lines("eval") != undisturbed.lines("eval"):
        found.append("the evaluations differ")
    wrong = sorted({name for (name, _), _ in run.tensors().items() ^ undisturbed.tensors().items()})
    return found + [f"{len(wrong)} tensors of the last checkpoint differ, first {name}" for name in wrong[:1]]


def table(blows: Sequence[Blow | Survived]) -> list[str]:
    """The medians by kind of fault, in seconds, and the steps that were done twice, in sum."""
    heads = ["fault", "times", *PHASES, "lost", "steps again"]
    rows = [heads]
    told = [blow for blow in blows if isinstance(blow, Blow)]
    for kind in sorted({blow.fault.kind for blow in told}):
        rows.append([kind, *_figures([blow for blow in told if blow.fault.kind == kind])])
    if told:
        rows.append(["all", *_figures(told)])
    for kind, times in sorted(Counter(blow.fault.kind for blow in blows if isinstance(blow, Survived)).items()):
        rows.append([kind, str(times), *["-"] * 4, "0.0", "0"])
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    return ["  ".join(f"{cell:{'<' if at == 0 else '>'}{widths[at]}}" for at, cell in enumerate(row)) for row in rows]


def _figures(blows: Sequence[Blow]) -> list[str]:
    seconds = [*(median(blow.spent[name] for blow in blows) for name in PHASES), median(blow.lost for blow in blows)]
    return [str(len(blows)), *(f"{value:.1f}" for value in seconds), str(sum(blow.again for blow in blows))]


def report(run: Driven, undisturbed: Driven, left_out: Mapping[str, str]) -> list[str]:
    """What struck, what it cost, and what did not strike."""
    steps = undisturbed.left.step()
    again = sum(blow.again for blow in run.blows if isinstance(blow, Blow))
    kinds = Counter(blow.fault.kind for blow in run.blows)
    attempts, goodput = run.left.status()["attempt"], undisturbed.seconds / run.seconds
    return [
        *table(run.blows),
        *(f"left out    {kind}: {why}" for kind, why in left_out.items()),
        f"faults      {len(run.blows)}: {', '.join(f'{kind} {times}' for kind, times in sorted(kinds.items()))}",
        f"starts      {attempts}, of which {run.starts} by the same command",
        f"steps       {steps}, and {again} of them again: goodput {steps / (steps + again):.3f}",
        f"seconds     {run.seconds:.0f}, undisturbed {undisturbed.seconds:.0f}: goodput {goodput:.3f}",
    ]
