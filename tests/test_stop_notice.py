"""run.stop_when: a file, or what a cloud's server says of this machine, ends a run as SIGTERM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.commands import SMALL, Command, curve, single, status
from tests.inside import here, product
from tests.processes import Processes
from trainer.launch.failure import STOPPED
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

WORDS = (
    *SMALL,
    "loop.steps=1000000",
    "loop.global_batch=8",
    "loop.eval_every=null",
    "schedule=constant",
    "run.dir=run",
)
AMAZON = "latest/meta-data/spot/instance-action"
GOOGLE = "computeMetadata/v1/instance/preempted"
AZURE = "metadata/scheduledevents?api-version=2020-07-01"


class Cloud(ThreadingHTTPServer):
    """The metadata server of a machine. A notice comes with the `notice_after`-th question; what was asked is kept."""

    def __init__(self, notice_after: int = 3) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.notice_after, self.asked = notice_after, list[str]()
        self.second = threading.Event()  # it has been asked twice

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class _Answers(BaseHTTPRequestHandler):
    server: Cloud

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200 if known else 404, "secret")

    def do_GET(self) -> None:
        path, before = self.path.lstrip("/"), self.server.notice_after - 1
        if path == AMAZON and self.headers["X-aws-ec2-metadata-token"] != "secret":
            return self._answer(401, "")
        self.server.asked.append(path)
        count = len(self.server.asked)
        if count == 2:
            self.server.second.set()
        notice = count > before
        if path == GOOGLE:
            known = self.headers["Metadata-Flavor"] == "Google"
            return self._answer(200 if known else 403, "TRUE" if notice else "FALSE")
        if path == AZURE:
            events = [{"EventId": "1", "EventType": "Preempt"}] if notice else []
            known = self.headers["Metadata"] == "true"
            return self._answer(200 if known else 400, json.dumps({"DocumentIncarnation": count, "Events": events}))
        return self._answer(500 if count == 1 else 200 if notice else 404, "")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""


@contextmanager
def cloud() -> Iterator[Cloud]:
    with Cloud() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.long
@pytest.mark.parametrize("path", [AMAZON, GOOGLE, AZURE])
def test_what_a_cloud_says_of_the_machine_ends_the_run_with_a_save(
    path: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which nobody is to be asked through
    with cloud() as server:
        words = [*WORDS, f"run.stop_when='{server.url(path)}'"]
        if path == GOOGLE:  # one rank of a machine asks for all of them
            # by torchrun's rule that they end with 0; what counts is status.json
            processes: Processes = request.getfixturevalue("processes")
            assert processes.run(2, product, tmp_path, [*words, "strategy=ddp"]) == [0, 0]
        else:
            assert product(Launch(), tmp_path, words) == STOPPED
        assert server.asked == [path] * 3
    end = status(tmp_path / "run")
    assert (end["state"], end["reason"]) == ("preempted", f"run.stop_when={server.url(path)}")
    # no step is lost: the newest checkpoint is that of the last step, and the run goes on from there
    assert (tmp_path / "run/checkpoints" / f"step-{end['step']:08}" / "manifest.json").is_file()
    assert product(Launch(), tmp_path, [*WORDS, f"loop.steps={end['step'] + 2}"]) == 0
    assert len(curve(tmp_path / "run")) == end["step"] + 2
    assert status(tmp_path / "run")["resume_step"] == end["step"]
    # Amazon's server answered 500 once: a line says so, and the run went on
    said = (tmp_path / "run/logs/rank-0.log").read_text()
    assert said.count("no answer (HTTP Error 500") == (path == AMAZON)


def test_a_file_that_appears_ends_the_run_with_a_save(tmp_path: Path) -> None:
    command = Command(single(*WORDS, "log=[console]", "run.stop_when=stop", "device=cpu"), tmp_path)
    command.wait_for_step(tmp_path / "run", 1)
    (tmp_path / "stop").touch()
    ended = command.end()
    assert (ended.code, ended.left) == (STOPPED, []), ended.screen
    end = status(tmp_path / "run")
    assert (end["state"], end["reason"]) == ("preempted", "run.stop_when=stop")
    assert (tmp_path / "run/checkpoints" / f"step-{end['step']:08}" / "manifest.json").is_file()
    assert "run.stop_when=stop" in ended.screen


@pytest.mark.parametrize("where", ["ftp://host/stop", "http://", "''"])
def test_what_cannot_be_asked_is_refused(where: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"run\.stop_when.*(text|a file, or a URL: http://host/)"):
        here(*WORDS[:-1], f"run.dir={tmp_path / 'run'}", f"run.stop_when={where}")
