"""Checkpoints: a folder of tensors and facts that is written whole or not at all, and verified before it is used.

Tensors go to safetensors files under their own names, sharded ones in parallel; everything else to JSON. Any number of
processes reads what any other number wrote.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor

from trainer.parallel.ranks import Ranks, all_or_none
from trainer.parallel.tensor_statistics import fingerprints
from trainer.records.checkpoint.base_weights import BASE_KEY, BaseWeights
from trainer.records.checkpoint.manifest import CheckpointInfo, CorruptCheckpoint
from trainer.records.checkpoint.mirror import NoMirror
from trainer.records.checkpoint.save_plan import SavePlanner
from trainer.records.checkpoint.store import (
    clean_leftovers,
    list_complete,
    open_newest,
    remove_checkpoint,
    select_surplus,
)
from trainer.records.checkpoint.writer import (
    CheckpointContents,
    FailedSave,
    NonFiniteState,
    SyncSaver,
    checkpoint_path,
    write_checkpoint,
)
from trainer.records.disk import Disk
from trainer.records.metrics_reader import metric_rank

log = logging.getLogger(__name__)


class NonFiniteSave(NamedTuple):
    """A step whose state was not saved because it is not finite, and which tensors; none: all is well."""

    step: int = 0
    tensors: Collection[str] = ()


class CheckpointManager:
    """The checkpoints/ folder of a run, which this run alone writes to."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        keep: int = 3,
        best: str = "-loss",
        facts: dict[str, Any] | None = None,
        required_state: Collection[str] = (),
        max_failures: int = 0,
        saver: SyncSaver | None = None,
        mirror: NoMirror | None = None,
        disk: Disk | None = None,
    ):
        self.required_state = required_state  # what the state of one that is gone on from must say
        self._max_failures = max_failures  # failed saves in a row that a run goes on after
        self._failures: list[str] = []  # of the last saves, since one succeeded
        self.folder, self.ranks, self.keep, self.best = folder, ranks, keep, best
        self._saver, self._planner = saver or SyncSaver(ranks), SavePlanner(ranks)
        self._mirror, self._disk = mirror or NoMirror(), disk or Disk()
        self.facts = {"world_size": ranks.size, **(facts or {})}  # of every manifest: strategy, …
        self._base: BaseWeights | None = None  # where frozen tensors lie that checkpoints leave out; the main rank's
        self._base_bits: dict[str, int] | None = None  # fingerprints of this rank's; None: checkpoints hold all
        self._rejected: set[Path] = set()  # found corrupt; they count for nothing when others are removed
        self._best_rank = (-math.inf, -math.inf)  # the best rank so far, with that of the save under way
        self._previous_rank: tuple[float, float] | None = None  # the same without it; None: none is under way
        if ranks.is_main:
            clean_leftovers(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._saver.close()

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        metrics: dict[str, float] | None = None,
        finite: Collection[str] = (),
        frozen: Collection[str] = (),
    ) -> NonFiniteSave:
        """Write one checkpoint, or begin to; it has its name once it is whole. Collective.

        tensors: what this rank holds. Those that are whole are equal on every rank that has them; not all ranks need
        have the same. finite: the names of those whose numbers must be; frozen: of those that nothing trains, which
        are left out as long as they are those of `begin_with`. FailedSave and what is returned: as `finish_save`.
        """
        previous = self.finish_save()  # one at a time
        if previous.tensors:
            return previous
        contents = self._contents(step, tensors, state, metrics or {}, finite, frozen)
        # counted from here on: whether the next metrics are better must be known before this one is on the disk
        self._previous_rank, self._best_rank = self._best_rank, max(self._best_rank, metric_rank(metrics, self.best))
        return self.finish_save(self._saver.start(partial(self._write, contents)))

    def _contents(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        metrics: dict[str, float],
        finite: Collection[str],
        frozen: Collection[str],
    ) -> CheckpointContents:
        """Collective: what is to be written, as it is now."""
        if self._base_bits is not None:
            current = fingerprints({name: tensor for name, tensor in tensors.items() if name in frozen})
            # all ranks; a byte: code of the run's own may have changed one, a teacher for example
            if any(self.ranks.max_values([current != self._base_bits])):
                self._base = self._base_bits = None
            else:
                tensors = {name: tensor for name, tensor in tensors.items() if name not in current}
        if self._base is not None:
            state = {**state, BASE_KEY: self._base.fields}
        # all ranks: hashes of what each holds; layouts only where those differ from the last save
        plan = self._planner.plan(tensors)
        return CheckpointContents(
            step,
            tensors=self._saver.snapshot({name: tensors[name] for name in plan.names}),
            plan=plan,
            state=deepcopy(state),
            metrics=metrics,
            finite=finite,
        )

    def _write(self, contents: CheckpointContents) -> None:
        """Collective over the saver's ranks, perhaps in a thread of its own: write it; then the surplus goes."""
        write_checkpoint(self.folder, self._saver.ranks, contents, self.facts, self._disk)
        if self.ranks.is_main:
            new_path = checkpoint_path(self.folder, contents.step)
            self._rejected.discard(new_path)
            # only after the new one stands: never is there a moment with fewer than were asked for
            with suppress(OSError):  # what cannot be removed now goes after the next save
                for path in select_surplus(list_complete(self.folder, self._rejected), self.keep, self.best):
                    if path != new_path:
                        remove_checkpoint(path)
            self._mirror.update(self._rejected)

    def failed(self) -> bool:
        """Has the save under way failed, as this rank knows? Then all must hear of it, and call `finish_save`."""
        return self._saver.failed()

    def finish_save(self, wanted: bool = True) -> NonFiniteSave:
        """Collective where it is wanted: wait for the save under way, if there is one; what was not finite in it.

        FailedSave where more saves in a row have failed than are forgiven.
        """
        if not wanted or self._previous_rank is None:
            return NonFiniteSave()
        rank_before, self._previous_rank = self._previous_rank, None
        try:
            self._saver.wait()
        except (FailedSave, NonFiniteState) as error:
            self._best_rank = rank_before  # it has beaten nobody
            if isinstance(error, NonFiniteState):
                return NonFiniteSave(error.step, error.tensors)
            self._forgive(error)
        else:
            self._failures = []
        return NonFiniteSave()

    def _forgive(self, error: FailedSave) -> None:
        """Say that a save has failed; FailedSave where it is one too many in a row. All ranks do the same."""
        self._failures.append(str(error))
        count = len(self._failures)
        if count > self._max_failures:
            ending = f". It is failed save number {count} in a row, so the run ends" if self._max_failures else ""
            raise FailedSave(f"{error}{ending}") from error
        if self.ranks.is_main:
            log.warning(
                "%s. The run goes on; failed saves in a row: %d of at most %d", error, count, self._max_failures
            )

    def finish(self) -> None:
        """Collective, after the last save of a run: FailedSave where that one failed, though it was forgiven.

        Nothing comes after it that could make up for it, so the run has not done what it was to do.
        """
        self.finish_save()
        if self._failures:
            raise FailedSave(
                f"{self._failures[-1]}. No save follows, so the run has failed: once there is space, the same command"
                " goes on from the newest checkpoint"
            )

    def newest(self) -> CheckpointInfo | None:
        """The newest checkpoint that is valid, None where there is none at all. Collective."""
        self.finish_save()
        newest, rejected = open_newest(self.folder, self.ranks, self.required_state)
        self._rejected = set(rejected)
        # the main rank reads what is to be beaten and tells all: they must agree on whether a checkpoint is the best
        others = list_complete(self.folder, self._rejected) if self.ranks.is_main else []
        if self.ranks.is_main:
            self._mirror.update(self._rejected)  # what an earlier start has left half copied
        best_rank = max(
            (metric_rank(manifest.metrics, self.best) for manifest in others), default=(-math.inf, -math.inf)
        )
        self._best_rank = self.ranks.broadcast_value(best_rank)  # all ranks; two numbers
        return newest

    def is_best(self, metrics: dict[str, float] | None) -> bool:
        """Are these metrics better than those of every checkpoint so far? The same answer on every rank."""
        return metrics is not None and metric_rank(metrics, self.best) > self._best_rank

    def improves(self, metrics: dict[str, float]) -> bool:
        """The same by the metric alone: where it stays equal, a loss that goes on falling improves nothing."""
        return metric_rank(metrics, self.best)[0] > self._best_rank[0]

    def read(self, checkpoint: CheckpointInfo, tensors: dict[str, Tensor]) -> None:
        """Fill the given tensors in place, of DTensors the shard this rank holds. Collective.

        Ranks may ask for different ones. CorruptCheckpoint, before any is touched, where one is missing or has another
        shape there. What the checkpoint does not hold, since it lies elsewhere, is taken out of `tensors`.
        """
        from trainer.records.checkpoint.tensor_files import load_tensors

        all_or_none(self.ranks, lambda: load_tensors(tensors, checkpoint), CorruptCheckpoint)
        if BASE_KEY not in checkpoint.state:  # what held all is followed by what holds all
            self._base = self._base_bits = None

    def begin_with(self, base: BaseWeights | None, frozen: Mapping[str, Tensor]) -> int:
        """Collective: as long as these tensors stay as they are no checkpoint holds them, only that they are `base`.

        base: on the main rank, which decides; None, or of other tensors: checkpoints hold all. Returns the bytes of
        these tensors that each checkpoint holds.
        """
        # all ranks, once; names and sizes: of a pipeline each stage has its own
        gathered = self.ranks.all_gather_values({name: tensor.nbytes for name, tensor in frozen.items()})
        sizes = {name: size for of_rank in gathered for name, size in of_rank.items()}
        # all ranks; one bit of the main one
        if self.ranks.broadcast_value(base is not None and base.shapes.keys() == sizes.keys()):
            self._base, self._base_bits = base, fingerprints(frozen)
            return 0
        return sum(sizes.values())
