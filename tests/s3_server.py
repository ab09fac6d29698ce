"""A real S3 server on loopback, moto's, and what may go wrong on the way to it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.request import urlopen

BUCKET = "bucket"


class Request(NamedTuple):
    """What a client has asked for."""

    method: str
    path: str  # /bucket/key
    range: str  # of bytes; empty: all
    sent: int  # bytes of the answer's body, as its header says


@dataclass
class Fault:
    """What happens to requests of this method, in whose path these letters stand."""

    kind: str  # 403, 503, slow, cut (no answer), lost (done, and no answer), hold (until it is released)
    method: str
    part: str
    times: int


@dataclass
class S3Server:
    """Where it is, what was asked of it, and what is to go wrong."""

    environment: dict[str, str]  # of processes that use it
    requests: list[Request] = field(default_factory=list)
    held: Event = field(default_factory=Event)  # a request is being held
    released: Event = field(default_factory=Event)
    faults: list[Fault] = field(default_factory=list)

    def plant(self, kind: str, method: str = "PUT", part: str = "", times: int = 1) -> None:
        """Have something go wrong, so many times."""
        self.faults.append(Fault(kind, method, part, times))

    def fault_of(self, method: str, path: str) -> str:
        """What goes wrong with this request; empty: nothing."""
        for fault in self.faults:
            if fault.times and fault.method == method and fault.part in path:
                fault.times -= 1
                return fault.kind
        return ""

    def files(self) -> Any:
        """The file system of fsspec for it."""
        import s3fs

        client = {"endpoint_url": self.environment["AWS_ENDPOINT_URL"], "region_name": "eu-central-1"}
        return s3fs.S3FileSystem(
            key="test", secret="test", client_kwargs=client, use_listings_cache=False, skip_instance_cache=True
        )

    def list_keys(self) -> list[str]:
        """All that lies in the bucket."""
        return sorted(path.removeprefix(f"{BUCKET}/") for path in self.files().find(BUCKET))


_ERRORS = {"403": "AccessDenied", "503": "SlowDown"}


class _Application:
    """moto, behind what goes wrong."""

    def __init__(self, server: S3Server) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._server, self._moto = server, DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        fault = self._server.fault_of(method, path)
        if fault == "hold":
            self._server.held.set()
            self._server.released.wait(120)
        if fault == "slow":
            Event().wait(0.5)  # seconds
        if fault in _ERRORS:
            start_response(f"{fault} {_ERRORS[fault]}", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{_ERRORS[fault]}</Code><Message>as planted</Message></Error>".encode()]
        if fault == "cut":
            return _cut(environ, start_response)

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            size = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
            sent = size if method == "GET" and status.startswith("20") else 0
            self._server.requests.append(Request(method, path, environ.get("HTTP_RANGE", ""), sent))
            return start_response(status, headers, *rest)

        if fault == "lost":
            b"".join(self._moto(environ, lambda *_: lambda _: None))
            return _cut(environ, start_response)
        return self._moto(environ, begin)


def _cut(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """The connection goes, and no answer came."""
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    start_response("500 Cut", [])
    return [b""]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """An empty bucket on a server of its own."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any) -> None: ...

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = S3Server({})
    http = make_server("127.0.0.1", 0, _Application(server), threaded=True, request_handler=Quiet)
    http.daemon_threads = True  # type: ignore[attr-defined]
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.environment |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{http.server_port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "eu-central-1",
    }
    # moto keeps what it holds for the whole process
    with urlopen(f"{server.environment['AWS_ENDPOINT_URL']}/moto-api/reset", b""):
        pass
    server.files().mkdir(BUCKET)
    server.requests.clear()
    try:
        yield server
    finally:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # of this process: the next server has another address
        server.released.set()
        http.shutdown()
        http.server_close()
        thread.join()
