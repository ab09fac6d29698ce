"""Weights & Biases: for each run one there, with its figures, its configuration and how it ended."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from trainer.launch.safe_files import make_folder, open_file, replace_file
from trainer.parallel.tensor_statistics import Histogram
from trainer.records.image_plots import plot_confusion_matrix, plot_image_grid
from trainer.records.resume_rules import parse_config
from trainer.records.sinks import NOT_METRICS, Line, ServiceSink

if TYPE_CHECKING:
    from wandb import Run


class WandB(ServiceSink):
    """Figures as `train/loss`, `eval/accuracy` …; whether they are sent at once, WANDB_MODE says."""

    def __init__(self, project: str | None = None, entity: str | None = None) -> None:
        """`project` and `entity` (a person or a team): None: as WANDB_PROJECT and WANDB_ENTITY say."""
        super().__init__("wandb")
        self._project, self._entity = project, entity
        self._run: Run | None = None

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Make the run there, or take it up again."""
        # in the main thread, as it may ask for a key; what cannot be sent is kept in files
        if not self.guarded(partial(self._begin, folder)) and self.guarded(partial(self._begin, folder, "offline")):
            self.tell(f"kept in {folder / 'wandb'}; to send it later: wandb sync {folder / 'wandb'}/offline-run-*")

    def images(self, tag: str, images: Tensor, step: int, words: Sequence[str] = ()) -> None:
        """Show images (B, C, H, W) in a grid, with words below them."""
        self._show(tag, plot_image_grid(images, words), step)

    def confusion(self, tag: str, counts: Tensor, step: int, names: Sequence[str] = ()) -> None:
        """Show a confusion matrix as a picture."""
        self._show(tag, plot_confusion_matrix(counts, names), step)

    def histograms(self, kind: str, histograms: Mapping[str, Histogram], step: int) -> None:
        """Show how numbers are distributed, by parameter."""
        import numpy
        import wandb

        for name, one in histograms.items():
            # of B bins the B + 1 limits
            edges = numpy.linspace(one.low, one.high, len(one.counts) + 1)
            self._log({f"{kind}/{name}": wandb.Histogram(np_histogram=(numpy.array(one.counts), edges))}, step)

    def text(self, tag: str, text: str) -> None:
        """Keep the configuration; a start that goes on may have another one."""
        if tag == "configuration" and self._run is not None:
            self.later(partial(self._run.config.update, parse_config(text), allow_val_change=True))

    def train(self, line: Line) -> None:
        """Add a point to every training curve."""
        self._add("train", line)

    def eval(self, line: Line) -> None:
        """Add a point to every evaluation curve."""
        self._add("eval", line)

    def end(self, state: str) -> None:
        """Send what is left, and how the run ended."""
        if self._run is not None:
            self.later(partial(_finish_run, self._run, state))

    def _begin(self, folder: Path, mode: Literal["offline"] | None = None) -> None:
        import wandb

        # the id is ours, so that a start without a network has one, and the next start the same
        path = folder / "wandb.id"
        known = None
        if path.is_file():
            with open_file(path, "rb") as file:
                known = file.read(100).decode().strip()
        make_folder(folder / "wandb")  # it would follow a link
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            dir=folder,
            id=known or secrets.token_hex(4),
            name=folder.name,
            resume="allow" if known else None,
            mode=mode,
            reinit="create_new",  # whoever calls from a notebook may have a run of their own
            settings=wandb.Settings(quiet=True, console="off"),  # logs/ has what was printed
        )
        replace_file(path, f"{self._run.id}\n")

    def _add(self, kind: str, line: Line) -> None:
        """Of a step that is there already, since it runs again after a crash, wandb keeps the first figures."""
        figures = {
            f"{kind}/{name}": value
            for name, value in line.items()
            if name not in NOT_METRICS and isinstance(value, (int, float))
        }
        self._log(figures, line["step"])

    def _show(self, tag: str, picture: Any, step: int) -> None:
        import wandb

        self._log({f"pictures/{tag}": wandb.Image(picture)}, step)

    def _log(self, what: dict[str, Any], step: int) -> None:
        # wandb takes together what comes for one step: a training line, an evaluation, pictures
        if self._run is not None:
            self.later(partial(self._run.log, what, step=step))


def _finish_run(run: Run, state: str) -> None:
    run.summary["state"] = state
    # with an exit code that is not 0 this is no failure there: the run is to go on
    if state == "preempted":
        run.mark_preempting()
    run.finish(exit_code=0 if state == "completed" else 1)
