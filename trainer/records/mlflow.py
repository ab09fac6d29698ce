"""MLflow: for each run one there, with its figures, its configuration and how it ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from trainer.launch.safe_files import open_file, replace_file
from trainer.records.resume_rules import parse_config
from trainer.records.sinks import NOT_METRICS, Line, ServiceSink

if TYPE_CHECKING:
    from mlflow import MlflowClient

_STATES = {"completed": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}
_MAX_WAITING = 10_000  # lines that wait for a server which does not answer; older ones are left out


class MLflow(ServiceSink):
    """Figures as `train/loss`, `eval/accuracy` …; at which server, MLFLOW_TRACKING_URI says."""

    def __init__(self, experiment: str | None = None) -> None:
        """`experiment`: the name of the one that the run belongs to; None: as MLflow's own variables say."""
        super().__init__("mlflow")
        self._experiment = experiment
        self._there: _RemoteRun | None = None

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Be ready for the run in this folder."""
        # here, in the main thread: a process that is forked while another one imports may wait for ever
        import mlflow

        self._there = _RemoteRun(mlflow.MlflowClient(), self._experiment, folder, self.idle)

    def text(self, tag: str, text: str) -> None:
        """Keep the configuration, as parameters."""
        if tag == "configuration" and self._there is not None:
            self.later(partial(self._there.configure, parse_config(text)))

    def train(self, line: Line) -> None:
        """Add a point to every training curve."""
        if self._there is not None:
            self.later(partial(self._there.add, "train", line.get("time", time()), line))

    def eval(self, line: Line) -> None:
        """Add a point to every evaluation curve."""
        if self._there is not None:
            self.later(partial(self._there.add, "eval", time(), line))

    def end(self, state: str) -> None:
        """Send what is left, and how the run ended."""
        if self._there is not None:
            self.later(partial(self._there.end, state))


class _RemoteRun:
    """The run at the server, and what that does not have yet. Only the service's own thread works with it."""

    def __init__(self, client: MlflowClient, experiment: str | None, folder: Path, idle: Callable[[], bool]) -> None:
        self._client, self._experiment, self._folder, self._idle = client, experiment, folder, idle
        self._id = ""  # once the server has answered
        self._parameters: dict[str, str] = {}
        self._lines: list[tuple[str, int, Line]] = []  # kind, milliseconds of the clock, figures
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
            self._id = self._taken_up() or self._made()
        parameters = [Param(key, value) for key, value in self._parameters.items()]
        # steps that run again after a crash, or after going back, are there already, and a point that was sent stays
        metrics = [
            Metric(f"{kind}/{name}", float(value), when, line["step"])
            for kind, when, line in self._lines
            if line["step"] > self._last[kind]
            for name, value in line.items()
            if name not in NOT_METRICS and isinstance(value, (int, float))
        ]
        self._client.log_batch(self._id, metrics, parameters)
        for kind, _, line in self._lines:
            self._last[kind] = max(self._last[kind], line["step"])
        self._parameters, self._lines = {}, []

    def _taken_up(self) -> str:
        """The run that an earlier start has made; empty where there is none at this server."""
        from mlflow.exceptions import MlflowException

        path = self._folder / "mlflow.id"
        if not path.is_file():
            return ""
        with open_file(path, "rb") as file:
            id = file.read(100).decode().strip()
        try:
            run = self._client.get_run(id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return ""
            raise
        for kind in self._last:
            points = self._client.get_metric_history(id, f"{kind}/loss")
            self._last[kind] = max((point.step for point in points), default=0)
        # a parameter keeps its first value: one that was changed since is in the run's folder
        self._parameters = {key: value for key, value in self._parameters.items() if key not in run.data.params}
        self._client.update_run(id, "RUNNING")
        return id

    def _made(self) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        found = self._client.get_experiment_by_name(name) if name else None
        default = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")  # MLflow's own `Default`
        experiment = found.experiment_id if found else self._client.create_experiment(name) if name else default
        run = self._client.create_run(experiment, run_name=self._folder.name)
        replace_file(self._folder / "mlflow.id", f"{run.info.run_id}\n")
        return run.info.run_id


def _flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Dotted keys to values as text; a list is one value."""
    if isinstance(tree, Mapping) and tree:
        return {key: value for name, item in tree.items() for key, value in _flatten(item, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): str(tree)}
