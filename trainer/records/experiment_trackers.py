"""Experiment trackers, Weights & Biases and MLflow: sinks whose service may be slow or gone, so a thread calls it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import time
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from trainer.launch.safe_files import make_folder, open_file, replace_file
from trainer.messages import Refusal, first_line
from trainer.parallel.tensor_statistics import Histogram
from trainer.records.image_plots import plot_confusion_matrix, plot_image_grid
from trainer.records.resume_rules import parse_config
from trainer.records.sinks import Line, Sink, measured_values

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from wandb import Run

_console = logging.getLogger(__name__)  # the screen and the log file
_PATIENCE = 30.0  # seconds that the end of a run waits for a service
_MAX_LETTERS = 150  # letters of an error: some packages put a whole conversation into one line


class ServiceSink(Sink):
    """Calls to a service, one after the other in a thread of their own; of those that fail the first is told."""

    def __init__(self, name: str, patience: float = _PATIENCE) -> None:
        self._name, self._told, self._patience = name, False, patience
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def enqueue(self, call: Callable[[], object]) -> None:
        """Make this call after those before it. The run does not wait for it."""
        self._calls.put(call)
        # a daemon: a call that hangs must not keep the process
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def call_guarded(self, call: Callable[[], object]) -> bool:
        """Make this call now; False where it failed."""
        try:
            call()
        except Exception as error:  # whatever a package makes of a network that is gone, or of a key that is wrong
            if not self._told:
                why = first_line(error).rstrip(".")[:_MAX_LETTERS]
                self.warn(f"{why}; the run continues, and its metrics are in metrics.jsonl")
            self._told = True
            return False
        return True

    def warn(self, fact: str) -> None:
        """Say something about the service where people look."""
        _console.warning("note        %s: %s", self._name, fact)

    def close(self) -> None:
        """Wait until all calls have been made, unless the service does not answer."""
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self.warn(f"no answer for {self._patience:g} s; all metrics are in metrics.jsonl")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self.call_guarded(call)


class WandB(ServiceSink):
    """Metrics as `train/loss`, `eval/accuracy` …; whether they are sent at once, WANDB_MODE says."""

    def __init__(self, project: str | None = None, entity: str | None = None) -> None:
        """`project` and `entity` (a person or a team): None: as WANDB_PROJECT and WANDB_ENTITY say."""
        super().__init__(require_package("wandb"))
        self._project, self._entity = project, entity
        self._run: Run | None = None

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Make the run there, or take it up again."""
        # in the main thread, as it may ask for a key; what cannot be sent is kept in files
        calls = partial(self._begin, folder), partial(self._begin, folder, "offline")
        if not self.call_guarded(calls[0]) and self.call_guarded(calls[1]):
            self.warn(f"kept in {folder / 'wandb'}; to send it later: wandb sync {folder / 'wandb'}/offline-run-*")

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

        for name, histogram in histograms.items():
            # of B bins the B + 1 limits
            edges = numpy.linspace(histogram.low, histogram.high, len(histogram.counts) + 1)
            self._log({f"{kind}/{name}": wandb.Histogram(np_histogram=(numpy.array(histogram.counts), edges))}, step)

    def text(self, tag: str, text: str) -> None:
        """Keep the configuration; a start that goes on may have another one."""
        if tag == "configuration" and self._run is not None:
            self.enqueue(partial(self._run.config.update, parse_config(text), allow_val_change=True))

    def train(self, line: Line) -> None:
        """Add a point to every training curve."""
        self._add("train", line)

    def eval(self, line: Line) -> None:
        """Add a point to every evaluation curve."""
        self._add("eval", line)

    def end(self, state: str) -> None:
        """Send what is left, and how the run ended."""
        if self._run is not None:
            self.enqueue(partial(_finish_run, self._run, state))

    def _begin(self, folder: Path, mode: Literal["offline"] | None = None) -> None:
        import wandb

        # the id is ours, so that a start without a network has one, and the next start the same
        path = folder / "wandb.id"
        known = _read_id(path)
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
        self._log({f"{kind}/{name}": value for name, value in measured_values(line)}, line["step"])

    def _show(self, tag: str, image: Any, step: int) -> None:
        import wandb

        self._log({f"pictures/{tag}": wandb.Image(image)}, step)

    def _log(self, what: dict[str, Any], step: int) -> None:
        # wandb takes together what comes for one step: a training line, an evaluation, pictures
        if self._run is not None:
            self.enqueue(partial(self._run.log, what, step=step))


def _finish_run(run: Run, state: str) -> None:
    run.summary["state"] = state
    # with an exit code that is not 0 this is no failure there: the run is to go on
    if state == "preempted":
        run.mark_preempting()
    run.finish(exit_code=0 if state == "completed" else 1)


def require_package(name: str) -> str:
    """The name of a package, and of the extra that brings it. Refusal where it is missing."""
    # looked for and not imported, which takes seconds and concerns the main rank alone; a folder of that name in
    # the present one, such as wandb leaves, is no package
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        how = f"pip install -e '.[{name}]'; or leave {name} out: log=[console]"
        raise Refusal(f"log=[{name}] needs the package {name}: {how}")
    return name


_STATES = {"completed": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}
_MAX_WAITING = 10_000  # lines that wait for a server which does not answer; older ones are left out


class MLflow(ServiceSink):
    """Metrics as `train/loss`, `eval/accuracy` …; at which server, MLFLOW_TRACKING_URI says."""

    def __init__(self, experiment: str | None = None) -> None:
        """`experiment`: the name of the one that the run belongs to; None: as MLflow's own variables say."""
        super().__init__(require_package("mlflow"))
        self._experiment = experiment
        self._remote: _RemoteRun | None = None

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Be ready for the run in this folder."""
        # here, in the main thread: a process that is forked while another one imports may wait for ever
        import mlflow

        self._remote = _RemoteRun(mlflow.MlflowClient(), self._experiment, folder, self._calls.empty)

    def text(self, tag: str, text: str) -> None:
        """Keep the configuration, as parameters."""
        if tag == "configuration" and self._remote is not None:
            self.enqueue(partial(self._remote.configure, parse_config(text)))

    def train(self, line: Line) -> None:
        """Add a point to every training curve."""
        if self._remote is not None:
            self.enqueue(partial(self._remote.add, "train", line.get("time", time()), line))

    def eval(self, line: Line) -> None:
        """Add a point to every evaluation curve."""
        if self._remote is not None:
            self.enqueue(partial(self._remote.add, "eval", time(), line))

    def end(self, state: str) -> None:
        """Send what is left, and how the run ended."""
        if self._remote is not None:
            self.enqueue(partial(self._remote.end, state))


class _RemoteRun:
    """The run at the server, and what that does not have yet. Only the service's own thread works with it."""

    def __init__(self, client: MlflowClient, experiment: str | None, folder: Path, idle: Callable[[], bool]) -> None:
        """idle: does no further call wait behind the present one?"""
        self._client, self._experiment, self._folder, self._idle = client, experiment, folder, idle
        self._id = ""  # once the server has answered
        self._parameters: dict[str, str] = {}
        self._lines: list[tuple[str, int, Line]] = []  # kind, milliseconds of the clock, the line
        self._last = {"train": 0, "eval": 0}  # the last steps that were sent, by earlier starts too

    def configure(self, configuration: Mapping[str, Any]) -> None:
        """Send the configuration."""
        self._parameters = _flatten(configuration)
        self._send()

    def add(self, kind: str, when: float, line: Line) -> None:
        """Send a line; where others are waiting behind it, with them in one request."""
        self._lines = [*self._lines[1 - _MAX_WAITING :], (kind, int(1000 * when), line)]
        if self._idle():
            self._send()

    def end(self, state: str) -> None:
        """Send the rest, and how the run ended."""
        self._send()
        self._client.set_tag(self._id, "state", state)
        self._client.set_terminated(self._id, _STATES[state])

    def _send(self) -> None:
        """What is waiting; it stays where the server does not answer, for the next time."""
        from mlflow.entities import Metric, Param

        if not self._id:
            self._id = self._find_run() or self._create_run()
        # steps that run again after a crash are there already, and a point that was sent stays
        metrics = [
            Metric(f"{kind}/{name}", float(value), when, line["step"])
            for kind, when, line in self._lines
            if line["step"] > self._last[kind]
            for name, value in measured_values(line)
        ]
        self._client.log_batch(self._id, metrics, [Param(key, value) for key, value in self._parameters.items()])
        for kind, _, line in self._lines:
            self._last[kind] = max(self._last[kind], line["step"])
        self._parameters, self._lines = {}, []

    def _find_run(self) -> str:
        """The run that an earlier start has made; empty where there is none at this server."""
        from mlflow.exceptions import MlflowException

        if not (id := _read_id(self._folder / "mlflow.id")):
            return ""
        try:
            run = self._client.get_run(id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return ""
            raise
        # the steps that the server has already, so that nothing is sent twice
        for kind in self._last:
            points = self._client.get_metric_history(id, f"{kind}/loss")
            self._last[kind] = max((point.step for point in points), default=0)
        # a parameter keeps its first value: one that was changed since is in the run's folder
        self._parameters = {key: value for key, value in self._parameters.items() if key not in run.data.params}
        self._client.update_run(id, "RUNNING")
        return id

    def _create_run(self) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")  # MLflow's own `Default`
        elif experiment := self._client.get_experiment_by_name(name):
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(name)
        run = self._client.create_run(experiment_id, run_name=self._folder.name)
        replace_file(self._folder / "mlflow.id", f"{run.info.run_id}\n")
        return run.info.run_id


def _read_id(path: Path) -> str:
    """The run's id at the service, which an earlier start has left; empty where there is none."""
    if not path.is_file():
        return ""
    with open_file(path, "rb") as file:
        return file.read(100).decode().strip()


def _flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Dotted keys to values as text; a list is one value."""
    if isinstance(tree, Mapping) and tree:
        return {key: value for name, item in tree.items() for key, value in _flatten(item, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): str(tree)}
