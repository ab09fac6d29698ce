"""Progress for Kubeflow Trainer: where its server asks for it, a sink posts how far the run is, and its metrics.

The server is there if the feature gate TrainJobStatus is on; then the pods have three variables, and `kubectl get
trainjob` shows the progress.
Source: proposal 2779 of kubeflow/trainer, "Track TrainJob progress and expose training metrics", and the server of
v2.3.0, whose code was read; it has not been run with this.
"""

from __future__ import annotations

import json
import os
import ssl
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from urllib.request import Request, urlopen

from trainer.records.experiment_trackers import ServiceSink
from trainer.records.sinks import Line, RemainingTime, Sink, measured_values

SERVER_URL = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN_FILE = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # a file; the cluster renews it
CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # a file
POST_INTERVAL = 5.0  # seconds between two posts: the server of all jobs takes only so many
POST_TIMEOUT = 5.0  # seconds that a post may take


class KubeflowStatus(ServiceSink):
    """Posts the progress of a run to the server that started its pods; a thread does it, and the run never waits."""

    def __init__(self, url: str) -> None:
        super().__init__("Kubeflow")
        self._url, self._posted = url, -POST_INTERVAL
        self._metrics: dict[str, float] = {}  # the newest of each name

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Where the run is going."""
        self._step, self._steps, self._remaining = step, steps, RemainingTime(steps)

    def train(self, line: Line) -> None:
        """Post where training is, unless that was done a moment ago."""
        self._step = int(line["step"])
        self._metrics |= dict(measured_values(line))
        remaining = self._remaining.seconds(line)
        if monotonic() - self._posted >= POST_INTERVAL:
            self._post(remaining)

    def eval(self, line: Line) -> None:
        """Post the metrics of an evaluation."""
        self._metrics |= {f"eval_{name}": value for name, value in measured_values(line)}
        self._post(None)

    def end(self, state: str) -> None:
        """Post how far the run has come."""
        self._post(0.0 if state == "completed" else None)

    def _post(self, remaining: float | None) -> None:
        """Send what is known now; remaining: seconds to the end, if known."""
        self._posted = monotonic()
        # what is not known is left out; lastUpdatedTime must be there, or the server refuses
        status = {
            **({"progressPercentage": min(100, 100 * self._step // self._steps)} if self._steps else {}),
            **({} if remaining is None else {"estimatedRemainingSeconds": round(remaining)}),
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in self._metrics.items()],
            "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self.enqueue(partial(_send, self._url, {"trainerStatus": status}))


def _send(url: str, content: dict[str, object]) -> None:
    """One post. OSError where the server does not take it."""
    headers = {"Content-Type": "application/json"}
    if TOKEN_FILE in os.environ:
        token = Path(os.environ[TOKEN_FILE]).read_text().strip()  # for each post: the cluster renews it
        headers["Authorization"] = f"Bearer {token}"
    # the cluster's own authority, which no system knows
    trust = ssl.create_default_context(cafile=os.environ.get(CERTIFICATE)) if url.startswith("https:") else None
    request = Request(url, json.dumps(content).encode(), headers, method="POST")
    with urlopen(request, timeout=POST_TIMEOUT, context=trust):
        pass


def kubeflow_sinks() -> list[Sink]:
    """The sink, if Kubeflow's variable is set."""
    return [KubeflowStatus(os.environ[SERVER_URL])] if os.environ.get(SERVER_URL) else []
