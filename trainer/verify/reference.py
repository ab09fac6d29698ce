"""The reference that `verify` compares with, and one process of its own that makes it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from trainer.configuration.command_line import add_overrides, quote_path
from trainer.jobs.run_parts import PreparedRun, RunParts
from trainer.launch.child_processes import import_path, run_program
from trainer.launch.launcher_environment import without_launcher_variables
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main
from trainer.messages import Refusal
from trainer.records.resume_rules import find_changes, parse_config
from trainer.verify.comparison import noise_floors, perturbation_size, tolerances_in
from trainer.verify.short_run import computing_in, detect_sample_layouts, train_and_record
from trainer.verify.training_record import TrainingRecord

_LAST = 2000  # characters of what a process that failed said last
_NO_MEMORY = re.compile(r"out of memory|can.t allocate memory|cannot allocate memory|bad_alloc|MemoryError", re.I)


def make_reference(run: PreparedRun, samples: int, path: Path) -> None:
    """Collective: have one process write the reference of a run with so many samples in a step to a file.

    Refusal with its own account where it fails.
    """

    def make() -> None:
        # this run's words, but for those that say how many processes there are and what is compared
        replaced = ("processes=", "job.reference=", "job.batch=")
        arguments = [word for word in run.arguments if not word.startswith(replaced)]
        environment = without_launcher_variables(os.environ) | {
            "PYTHONPATH": import_path(),
            "TRAINER_PARENT": str(os.getpid()),
        }
        words = add_overrides(arguments, f"job.batch={samples}", f"job.record={quote_path(path)}")
        code, printed = run_program(words, environment)
        output = printed.strip()[-_LAST:]
        if code == 2:  # a refusal, as this run might have had
            raise Refusal(output)
        if code == -signal.SIGKILL or (code and _NO_MEMORY.search(output)):
            lack = (output or "killed").splitlines()[-1]
            raise Refusal(
                f"job=verify: the reference does not fit into one process, in fp64: {lack}. What works: a smaller"
                " network by a key of its own (its depth, its width, its vocabulary), a smaller job.batch where samples"
                " are large, or the reference on a machine with more memory (job.record)"
            )
        if code:
            raise Refusal(f"job=verify: the same words on one process fail:\n{output}")

    broadcast_from_main(run.machine.launch, "reference", make)


# What a reference has from the words of its run. What is not here may differ: strategy, devices, files, a precision,
# and how a step is divided.
_OF_REFERENCE = (
    *("model", "task", "data", "seed", "optimizer", "schedule", "ema.", "init_from"),
    *("loop.epochs", "loop.steps", "loop.max_norm", "loop.dropout", "loop.eval_batch", "loop.on_nonfinite"),
)


def read_reference(path: Path, run: RunParts, steps: int, samples: int | None) -> TrainingRecord:
    """The reference that somebody has had made. Refusal where the file is none, or that of other words.

    steps, samples: what the words ask for; None: as the reference has it.
    """
    if not path.is_file():
        raise Refusal(f"job.reference={path}: there is no such file; job.record={path} writes it")
    with suppress(SafetensorError, KeyError):  # another file, or one of an older version
        facts = (reference := TrainingRecord.read(path)).facts
        if "configuration" in facts:
            changes = find_changes(parse_config(facts["configuration"]), parse_config(run.configuration))
            words = [str(change) for change in changes if change.key.startswith(_OF_REFERENCE)]
            for name, asked in (("steps", steps), ("samples", samples or facts["samples"])):
                if facts[name] != asked:
                    words.append(f"job.{name.replace('samples', 'batch')}: {facts[name]} → {asked}")
            if words:
                raise Refusal(
                    f"job.reference={path} was made with other words ({', '.join(words[:6])}): give the same, or make"
                    " another reference of these with job.record=FILE"
                )
            return reference
    raise Refusal(f"job.reference={path} is no reference, or an older version has written it; job.record={path} does")


def record_reference(
    run: PreparedRun, ends: Sequence[int], tolerance: float, stop: StopRequest
) -> tuple[TrainingRecord, bool]:
    """What this one process does in fp64, or in fp32 where it cannot; False: somebody asked to stop.

    ends: the step after which others resume, and the last one.
    """
    try:
        return _record_twice(run, ends, tolerance, stop, "fp64", "")
    except (RuntimeError, TypeError, ValueError) as error:
        reason = f"{error}".strip().partition("\n")[0]
        if _NO_MEMORY.search(reason):
            raise
    # what fails here as well is no question of the precision
    return _record_twice(run, ends, tolerance, stop, "fp32", reason)


def _record_twice(
    run: PreparedRun, ends: Sequence[int], tolerance: float, stop: StopRequest, precision: str, reason: str
) -> tuple[TrainingRecord, bool]:
    """All of it twice, the second time with all weights moved by a last bit: so far does rounding alone carry it.

    because: why it is not done in a wider precision.
    """
    half, last = ends
    with computing_in(run, precision):
        layouts = detect_sample_layouts(run)
        record, perturbed = TrainingRecord(layouts=layouts), TrainingRecord(layouts=layouts)
        done = train_and_record(run, record, [last], stop, resume=half)
        done = done and train_and_record(run, perturbed, [last], stop, resume=half, shake=perturbation_size(precision))
    record.floors = noise_floors(record, perturbed, tolerances_in(precision, tolerance)) if done else {}
    record.facts |= {"precision": precision, "because": reason, "samples": run.settings.loop.global_batch}
    record.facts |= {"configuration": run.configuration}
    return record, done
