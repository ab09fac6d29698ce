"""What a plan tells: a row for each strategy, as a table and as plan.json, and what to choose or to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.jobs.batch_sizes import BatchSizes, more_micro_batches
from trainer.jobs.plan.devices import Device
from trainer.jobs.plan.ledger import KINDS, Peak
from trainer.jobs.plan.traffic import Collective
from trainer.jobs.plan.trial import EVALUATION, RankUsage
from trainer.messages import format_count

_MIB = 2**20
AS_ASKED = "as asked"  # the strategy that the command line names


@dataclass(frozen=True)
class Row:
    """What one strategy takes on so many processes: the rank that holds most, and about how long a step takes."""

    strategy: str
    arguments: str  # of the command line, which choose it
    processes: int
    batches: BatchSizes
    rank: int  # that holds most
    at_peak: Peak
    collectives: list[Collective]  # of that rank
    step_s: float | None  # about, of a step; None: not known
    host: int  # the most bytes that offloaded activations take in the host's memory
    fits: bool
    advice: str  # what to change where it does not fit; empty where it fits
    not_evaluated: str  # why evaluations are not in the peak; empty: they are

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.at_peak.bytes

    def wire(self, between: bool) -> int:
        """Bytes that a rank sends in a step, between machines or inside one."""
        return round(sum(each.wire for each in self.collectives if each.between == between))


def make_row(
    strategy: str,
    arguments: str,
    processes: int,
    usages: Sequence[RankUsage],
    batches: BatchSizes,
    device: Device,
) -> Row:
    """The row of a strategy, from what its ranks use."""
    # memory of the rank that holds most, time of the slowest: these may be two ranks of a pipeline
    largest = max(usages, key=lambda usage: usage.peak.bytes)
    seconds = [took for usage in usages if (took := _step_seconds(usage, batches, device)) is not None]
    fits = largest.peak.bytes <= device.free
    return Row(
        strategy,
        arguments,
        processes,
        batches,
        largest.rank,
        largest.peak,
        largest.collectives,
        max(seconds, default=None),
        max(usage.host for usage in usages),
        fits,
        "" if fits else _advise_by_kind(largest.peak, batches),
        largest.not_evaluated,
    )


def _advise_by_kind(peak: Peak, batches: BatchSizes) -> str:
    """What may help, by what most of the memory is for. It has not been tried."""
    if peak.moment.startswith(EVALUATION):
        return f"most is needed in evaluations: loop.eval_batch={batches.total}, or less"
    kind = max(peak.by_kind, key=lambda kind: peak.by_kind[kind])
    if kind != "activations":
        return f"most of it is {kind}: more processes, with a strategy that divides them (fsdp, or fsdp_tp)"
    more = more_micro_batches(batches)
    smaller = f"loop.micro_batches={more}, " if more else ""
    return f"most of it is activations: {smaller}strategy.activation_checkpointing=units, or precision=bf16"


def _step_seconds(usage: RankUsage, batches: BatchSizes, device: Device) -> float | None:
    """About how long a rank takes for a step, by the data sheet of its device; None: it has none."""
    if usage.seconds is None:
        return None
    # a pipeline's bubble: of P stages each is idle for P - 1 micro-batches
    stages = max((each.ranks for each in usage.collectives if each.op in ("send", "receive")), default=1)
    compute = usage.seconds * (1 + (stages - 1) / batches.micro_batches)
    waited, beside = (
        sum(
            each.wire / ((device.between if each.between else device.inside) * 1e9)
            for each in usage.collectives
            if each.waits == waits
        )
        for waits in (True, False)
    )
    return waited + max(compute, beside)


def row_facts(row: Row) -> dict[str, Any]:
    """A row as it stands in plan.json."""
    return {
        "strategy": row.strategy,
        "words": row.arguments,  # this name is a promise to who reads the file
        "processes": row.processes,
        "batches": str(row.batches),
        "micro_batch": row.batches.largest,
        "peak": row.peak,
        "by_kind": dict(row.at_peak.by_kind),
        "host": row.host,
        "rank": row.rank,
        "when": row.at_peak.moment,
        "modules": [{"name": name, "bytes": size} for name, size in row.at_peak.modules],
        "wire": {"inside": row.wire(between=False), "between": row.wire(between=True)},
        "collectives": [asdict(each) for each in row.collectives],
        "step_s": row.step_s,
        "fits": row.fits,
        "advice": row.advice,
    }


def format_plan_table(rows: Sequence[Row], refused: Mapping[str, str], device: Device) -> list[str]:
    """The rows of one number of processes, as lines for people."""
    # one line for each reason, with all strategies that it keeps out
    reasons: dict[str, list[str]] = {}
    for words, reason in refused.items():
        reasons.setdefault(reason, []).append(words.removeprefix("strategy=") or AS_ASKED)
    left_out = [f"not planned {'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    if not rows:
        return left_out
    width = max(len(row.arguments or AS_ASKED) for row in rows)
    timed = rows[0].step_s is not None
    columns = ["peak", *KINDS, "inside", "between", *(["about ms"] if timed else [])]
    place = f"{format_count(rows[0].processes, 'process')} on {device.name}, of {device.memory:g} GiB each"
    lines = [
        "",
        f"{place}: MiB of the rank that holds most, and that it sends in a step",
        f"{'':<{width}} " + " ".join(f"{column:>11}" for column in columns) + "  fits",
    ]
    for row in rows:
        sizes = [row.peak, *(row.at_peak.by_kind[kind] for kind in KINDS), row.wire(False), row.wire(True)]
        cells = [f"{size / _MIB:>11,.1f}" for size in sizes]
        cells += [f"{row.step_s * 1e3:>11,.2g}"] if row.step_s is not None else []
        verdict = "yes" if row.fits else f"no: {(row.peak - device.free) / _MIB:,.0f} MiB too many; {row.advice}"
        lines.append(f"{row.arguments or 'as asked':<{width}} {' '.join(cells)}  {verdict}")
    # the same network and task under every strategy, so one reason is enough
    without = next((row.not_evaluated for row in rows if row.not_evaluated), "")
    offloaded = ", ".join(f"{row.arguments or AS_ASKED} {row.host / _MIB:,.1f}" for row in rows if row.host)
    lines += (
        [f"host        MiB of the host's memory for each rank's offloaded activations: {offloaded}"]
        if offloaded
        else []
    )
    return [*lines, *([f"left out    evaluations, which cannot be tried: {without}"] if without else []), *left_out]


def advise(rows: Sequence[Row], facts: Mapping[str, Any]) -> list[str]:
    """What to use, and of how many processes each strategy fits at least."""
    least: dict[str, int] = {}  # strategy → the smallest number of processes on which it fits
    for row in sorted(rows, key=lambda row: row.processes):
        if row.fits:
            least.setdefault(row.strategy, row.processes)
    if not least:
        return [f"fits        {facts['why']}"]
    counts = sorted({row.processes for row in rows})
    fits = ", ".join(f"{name} {count}" for name, count in least.items())
    lines = [f"fits        on so many processes at least, of {counts}: {fits}"] if len(counts) > 1 else []
    moment = next((row["when"] for row in facts["rows"] if row["words"] == facts["chosen"]), "")
    return [*lines, f"chosen      for {counts[-1]}: {facts['why']}", f"most        in: {moment}"]
