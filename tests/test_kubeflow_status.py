"""Progress for Kubeflow Trainer, posted to a server on loopback that takes what the real one takes."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.commands import SMALL
from tests.inside import here
from trainer.records import kubeflow_status
from trainer.records.kubeflow_status import SERVER_URL, TOKEN_FILE

Posts = list[tuple[str, dict[str, Any]]]  # the token, and what was posted


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Posts, list[int]]]:
    """What was posted, and the codes that the server answers with: the last one again and again."""
    posts: Posts = []
    codes = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            posts.append((self.headers["Authorization"], content))
            self.send_response(codes[0] if len(codes) == 1 else codes.pop(0))
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv(SERVER_URL, f"http://127.0.0.1:{http.server_port}/apis/trainer.kubeflow.org/v1alpha1/status")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    monkeypatch.setattr(kubeflow_status, "POST_INTERVAL", 0.0)
    yield posts, codes
    http.shutdown()
    http.server_close()


def test_progress_and_metrics_are_posted_with_the_token(server: tuple[Posts, list[int]], tmp_path: Path) -> None:
    here(*SMALL, "loop.steps=4", "loop.log_every=1", "log=[]", f"run.dir={tmp_path}/run")
    posts, _ = server
    states = [content["trainerStatus"] for _, content in posts]
    assert {token for token, _ in posts} == {"Bearer first"}
    # the four lines, an evaluation, and the end
    assert [state["progressPercentage"] for state in states] == [25, 50, 75, 100, 100, 100]
    assert states[-1]["estimatedRemainingSeconds"] == 0
    assert all(state["lastUpdatedTime"].endswith("Z") for state in states)  # without it the server refuses
    metrics = {metric["name"]: metric["value"] for metric in states[-1]["metrics"]}
    assert {"loss", "lr", "eval_loss", "eval_accuracy"} <= set(metrics)
    assert all(isinstance(value, str) and float(value) == float(value) for value in metrics.values())


def test_a_server_that_refuses_is_told_once_and_the_run_goes_on(
    server: tuple[Posts, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    posts, codes = server
    codes[:] = [403]
    assert here(*SMALL, "loop.steps=3", "loop.log_every=1", "log=[]", f"run.dir={tmp_path}/run") == 0
    assert len(posts) == 5
    screen = capsys.readouterr()
    assert (screen.out + screen.err).count("Kubeflow: HTTP Error 403") == 1
