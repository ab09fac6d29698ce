"""The sections of the first hour. Each writes lines as it goes and names what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

from scripts.benchmarks.bare_loop import WORKLOADS
from scripts.first_hour import cases
from scripts.first_hour.runs import LATE, Ended, Runs

SLOW = 1.15  # times the bare loop: more is wrong
MIB = 2**20
QUICK_TESTS = ("tests/test_devices.py", "tests/test_numbers.py")


@dataclass
class Hour:
    """What all sections share."""

    runs: Runs
    write: Callable[[str], None]  # one line of the report
    wrong: Callable[[str], None]  # one thing that is not as it should be
    gpus: int
    cores: int
    jobs: int  # runs at the same time, where no time is measured
    quick: bool

    def table(self, *columns: str) -> None:
        """The head of a table."""
        self.row(*columns)
        self.row(*["---"] * len(columns))

    def row(self, *cells: object) -> None:
        """One line of it."""
        self.write(f"| {' | '.join(map(str, cells))} |")

    def check(self, name: str, ended: Ended) -> bool:
        """Did the command end well? If not, that is wrong."""
        if ended.code:
            self.wrong(f"{name} ended with {ended.code}: {ended.why}")
        return not ended.code

    def at_once(self, calls: Iterable[Callable[[], None]]) -> None:
        """Make these calls, some at the same time; the first exception ends them all."""
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.runs.stop()
                raise


def machine(hour: Hour) -> None:
    """What the machine is."""
    for key, value in hour.runs.facts.items():
        if key == "versions":
            shown = {**value, **value["packages"]}
            value = ", ".join(f"{name} {each}" for name, each in shown.items() if each and name != "packages")
        elif key in ("memory", "free", "shared_memory", "locked_memory"):
            value = f"{value / 2**30:.1f} GiB"
        hour.write(f"- {key.replace('_', ' ')}: {value}")
    hour.write(f"- accelerators: {hour.gpus}")
    if hour.runs.device == "cuda" and shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
        command = ["nvidia-smi", asked, "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
        for line in (said.stdout or said.stderr).splitlines():
            hour.write(f"- nvidia-smi (name, driver, memory, power, clock): {line}")


def tests(hour: Hour) -> None:
    """The tests that are marked `gpu`."""
    files = QUICK_TESTS if hour.quick else ("tests",)
    words = ["-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "--continue-on-collection-errors", *files]
    ended = hour.runs.command("tests", words)
    # lines as `tests/test_x.py::test_y PASSED [ 10%]`: they are there too if the time was too short
    found = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", ended.screen, re.MULTILINE)
    counts = Counter(how for _, how in found)
    hour.write(f"- {', '.join(f'{count} {how.lower()}' for how, count in counts.items()) or 'no test ran'}")
    for name, how in found:
        if how in ("FAILED", "ERROR"):
            hour.wrong(f"{how.lower()}: `{name}`")
    broken = re.findall(r"^ERROR (\S+\.py)(?: - (.*))?$", ended.screen, re.MULTILINE)
    for name, why in broken:
        hour.wrong(f"cannot be collected: `{name}` {why}")
    if ended.code == LATE:
        hour.wrong(f"the tests ran out of time after {len(found)}; the last was {found[-1][0] if found else 'none'}")
    elif ended.code and not broken and not {"FAILED", "ERROR"} & {*counts}:
        hour.check("pytest", ended)


def doctor(hour: Hour) -> None:
    """`job=doctor`, which also measures what a plan reads."""
    words = f"-m trainer job=doctor device={hour.runs.device} run.root={hour.runs.folder}"
    words += f" processes={hour.gpus}" * (hour.gpus > 1) + " job.seconds=1" * hour.quick
    ended = hour.runs.command("doctor", words.split())
    for line in ended.screen.splitlines():
        hour.write(f"    {line}")
    hour.check("job=doctor", ended)


def strategies(hour: Hour) -> None:
    """Every strategy and precision beside the curve of one CPU process in fp32; `job=verify` of every strategy."""
    network = cases.SMALL_TOKENS if hour.quick else cases.TOKENS
    chosen = cases.quick_cases(hour.gpus) if hour.quick else cases.cases(hour.gpus)
    references: dict[str, dict[int, float]] = {}
    for words in dict.fromkeys(case.network for case in chosen):
        name = f"reference-{len(references)}"
        hour.check("the reference", hour.runs.trainer(name, f"{network} {words} precision=fp32 device=cpu"))
        references[words] = hour.runs.losses(name)  # they are there too where only a save has failed
    hour.table("strategy", "precision", "steps", "largest difference", "tolerance", "")
    # those with most processes first, so that none of them is alone at the end
    order = sorted(chosen, key=lambda case: -case.processes)
    precisions = ["fp32"] if hour.quick else [*cases.PRECISIONS]
    pairs = [(case, precision) for case in order for precision in precisions]
    curves = [partial(_curve, hour, *pair, network, references.get(pair[0].network, {})) for pair in pairs]
    hour.at_once([*curves, *(partial(_verify, hour, case, network) for case in order)])


def _curve(hour: Hour, case: cases.Case, precision: str, network: str, reference: dict[int, float]) -> None:
    """Train once, and compare the losses with those of the reference."""
    name, tolerance = f"curve-{case.name}-{precision}", cases.PRECISIONS[precision]
    ended = hour.runs.trainer(name, f"{network} {case.network} {case.words} precision={precision}")
    got = hour.runs.losses(name)
    # a step that is missing, or whose loss is no number, is as far as can be: nan is in no tolerance
    gap = max((abs(got.get(step, nan) - loss) for step, loss in reference.items()), key=_order, default=nan)
    shown, well = ("ok", True) if gap <= tolerance else ("FAR", False)
    if ended.code == 2:
        # in other precisions a device may lack what it takes, and other strategies need what some machines lack
        shown, well = f"refused: {ended.why}", precision != "fp32" or case.strategy not in cases.MUST
    elif ended.code:
        shown, well = f"ended with {ended.code}: {ended.why}", False
    hour.row(case, precision, len(got), f"{gap:.1e}", f"{tolerance:.0e}", shown)
    if not well:
        hour.wrong(f"{case}, {precision}: {shown}")


def _verify(hour: Hour, case: cases.Case, network: str) -> None:
    """`job=verify` of a strategy."""
    words = f"{network} {case.network} {case.words} precision=fp32 job=verify"
    ended = hour.runs.trainer(f"verify-{case.name}", words)
    verdict = re.search(r"^[A-Z]+: .*$", ended.screen, re.MULTILINE)  # `SAME: fsdp on 2, …`
    shown = verdict[0] if verdict else "refused: " * (ended.code == 2) + ended.why
    hour.row(case, "verify", "", "", "", shown.replace("|", "/"))
    if ended.code not in (0, 2):
        hour.wrong(f"job=verify of {case} ended with {ended.code}: {shown}")


def _order(gap: float) -> tuple[bool, float]:
    """nan is the largest."""
    return gap != gap, gap


def resume(hour: Hour) -> None:
    """A run that was stopped and resumed, and two deterministic runs, have the same bits."""
    tokens, images = (cases.SMALL_TOKENS, cases.SMALL_IMAGES) if hour.quick else (cases.TOKENS, cases.IMAGES)
    half = int(tokens.rpartition("=")[2]) // 2
    tokens = f"{tokens} {cases.DROPOUT}"
    hour.table("what", "steps", "same bits", "")

    def same(what: str, first: list[tuple[str, str]], second: list[tuple[str, str]]) -> None:
        """Each is a list of commands (run, words) one after another; the last of each are compared."""
        for name, words in first + second:
            ended = hour.runs.trainer(name, words)
            if ended.code:
                hour.row(what, "", "no", f"ended with {ended.code}: {ended.why}")
                return hour.wrong(f"{what}: ended with {ended.code}: {ended.why}")
        one, other = (hour.runs.bits(runs[-1][0]) for runs in (first, second))
        differ = [step for step in one.keys() | other.keys() if one.get(step) != other.get(step)]
        hour.row(what, len(one), "no" if differ or not one else "yes", f"from step {min(differ)}" if differ else "")
        if differ or not one:
            hour.wrong(f"{what}: other bits from step {min(differ, default=0)}")
        return None

    def resumed(strategy: str) -> None:
        words = f"{tokens} strategy={strategy}"
        name = f"resumed-{strategy}"
        parts = [(name, f"{words} loop.steps={half}"), (name, words)]
        same(f"{strategy}, resumed after {half} steps", [(f"whole-{strategy}", words)], parts)

    def deterministic(what: str, words: str) -> None:
        words += " loop.deterministic=true strategy=single"
        same(f"deterministic {what}, twice", [(f"first-{what}", words)], [(f"second-{what}", words)])

    names = ["single"] if hour.quick else ["single", "fsdp", "zero1"]
    twice = [partial(deterministic, "images", images), partial(deterministic, "tokens", tokens)]
    hour.at_once([*(partial(resumed, name) for name in names), *twice])


def _timed_words(hour: Hour, name: str) -> tuple[str, int]:
    """The words of a run whose time is measured, and its steps."""
    steps = 4 if hour.quick else 40
    loop = f"loop.steps={steps} loop.log_every={steps // 2} loop.eval_every=null loop.save_every=null"
    loop += f" loop.eval_batch={WORKLOADS[name].batch}"  # the largest batch, and so the peak, is that of a step
    workers = f" loader.workers={3 * hour.cores // 4}" if name == "resnet50" else ""
    precision = "" if hour.runs.device == "cpu" else " precision=bf16"
    return f"{WORKLOADS[name].words} {loop} schedule=constant log=[] strategy=single{precision}{workers}", steps


def _threads(hour: Hour) -> dict[str, str]:
    """Of programs whose time is measured, so that both have the same."""
    return {"OMP_NUM_THREADS": "1" if hour.runs.device == "cpu" else "4"}


def bench(hour: Hour) -> None:
    """The time of a step, and the most memory, beside a loop by hand over the same network; one program at a time."""
    names = ("mlp", "gpt_nano") if hour.quick else ("resnet50", "gpt2")
    compiled = [] if hour.quick else [("gpt2", True)]
    hour.table("network", "bare ms", "ours ms", "ratio", "bare MiB", "ours MiB", "samples/s")
    for name, compiles in [*((name, False) for name in names), *compiled]:
        words, steps = _timed_words(hour, name)
        label = name + (" compiled" if compiles else "")
        bare_words = ["-m", "scripts.benchmarks.bare_loop", name, hour.runs.device, "--steps", str(steps)]
        bare = hour.runs.command(f"bare-{name}-{compiles}", bare_words + ["--compile"] * compiles, **_threads(hour))
        ran = f"bench-{name}" + ("-compiled" if compiles else "")
        ours = hour.runs.trainer(ran, words + " compile.mode=default" * compiles, **_threads(hour))
        if not (hour.check(f"the bare loop of {label}", bare) & hour.check(label, ours)):
            continue
        by_hand: dict[str, Any] = json.loads(bare.screen.splitlines()[-1])
        # the last log line is of the second half, as the bare loop's time
        seconds = hour.runs.lines(ran)[-1]["step_s"]
        ratio, peak = seconds / by_hand["step_s"], hour.runs.measured(ran).get("peak", nan)
        times = f"{1e3 * by_hand['step_s']:.1f}", f"{1e3 * seconds:.1f}", f"{ratio:.3f}"
        memory = f"{(by_hand['peak'] or nan) / MIB:.0f}", f"{peak / MIB:.0f}"
        hour.row(label, *times, *memory, f"{WORKLOADS[name].batch / seconds:.0f}")
        if ratio > SLOW and not hour.quick:  # few steps on a CPU that others use say nothing
            hour.wrong(f"{label}: a step takes {ratio:.2f} times as long as the bare loop's")


def plan(hour: Hour) -> None:
    """What `job=plan` says beside what a run's own summary says."""
    from trainer.jobs.plan.devices import DEVICES

    names = ("mlp", "gpt_nano") if hour.quick else ("resnet50", "gpt2")
    own, size = hour.runs.facts["device"], hour.runs.facts["memory"] / 2**30
    known = ["cpu"] if hour.runs.device == "cpu" else [key for key, each in DEVICES.items() if each.name in own]
    if not known:
        hour.write(f"- job=plan has no data sheet of {own}; job.device=own takes its figures from you")
        return
    device = min(known, key=lambda key: abs(DEVICES[key].memory - size))  # an A100 has 40 or 80 GiB
    hour.table("network", "planned MiB", "measured MiB", "", "planned ms", "measured ms", "")
    for name in names:
        words, _ = _timed_words(hour, name)
        planned = hour.runs.trainer(
            f"plan-{name}", f"{words} job=plan job.device={device} job.processes=[1] job.strategies=[single]"
        )
        ran = f"bench-{name}"
        if not (hour.runs.folder / ran / "environment.json").is_file():  # the section bench has not run it
            hour.check(name, hour.runs.trainer(ran, words, **_threads(hour)))
        if not hour.check(f"job=plan of {name}", planned):
            continue
        facts = json.loads((hour.runs.folder / f"plan-{name}" / "plan" / "plan.json").read_text())
        if not facts["rows"]:
            hour.wrong(f"job=plan of {name}: {facts['refused']}")
            continue
        (row,) = facts["rows"]
        # the run's own step time has its first steps in it; the last log line has only warm ones
        measured = {**hour.runs.measured(ran), "step_s": hour.runs.lines(ran)[-1]["step_s"]}
        cells: list[str] = []
        for key, unit in (("peak", 1 / MIB), ("step_s", 1e3)):
            planned_value, value = row[key] * unit, measured.get(key, nan) * unit
            cells += [f"{planned_value:.1f}", f"{value:.1f}", f"{100 * (planned_value / value - 1):+.0f} %"]
        hour.row(name, *cells)


SECTIONS: dict[str, tuple[Callable[[Hour], None], int]] = {  # by name; seconds that it has at most
    "machine": (machine, 60),
    "tests": (tests, 240),
    "doctor": (doctor, 90),
    "strategies": (strategies, 300),
    "resume": (resume, 120),
    "bench": (bench, 300),
    "plan": (plan, 120),
}
