"""run.stop_when: a file or a URL that says that this machine is taken away; it is asked beside the steps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import ProxyHandler, Request, build_opener

from trainer.launch.rendezvous import Launch
from trainer.launch.stop_signals import StopRequest
from trainer.messages import expand_home

_INTERVAL = 2.0  # seconds from one look to the next; the shortest notice, Google's and Azure's, is 30 s
_PATIENCE = 5.0  # seconds for an answer
_MOST = 2**16  # bytes of an answer
# Google's and Azure's servers answer only who sends these; nobody else minds.
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
# Amazon's asks for a token first (IMDSv2), at this place on the same server.
_TOKEN_PATH, _TOKEN_HEADER = "/latest/api/token", "X-aws-ec2-metadata-token"
# A metadata server is on the machine itself: no proxy of the environment knows it.
_open = build_opener(ProxyHandler({})).open
log = logging.getLogger(__name__)


@contextmanager
def watch_stop_notice(where: str | None, request: StopRequest, launch: Launch) -> Iterator[None]:
    """Inside, a notice becomes a request to stop, as a signal does. One rank of each machine asks for all of them."""
    if where is None or launch.local_rank != 0:
        yield
        return
    # a run that is called from Python may change its folder
    place, ended = where if _is_url(where) else str(expand_home(where).absolute()), threading.Event()
    arguments = (where, place, request, ended)
    thread = threading.Thread(target=_watch, args=arguments, name="run.stop_when", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_PATIENCE)


def _watch(where: str, place: str, request: StopRequest, ended: threading.Event) -> None:
    """In a thread of its own, since a server may be slow: ask until there is a notice, or the run has ended."""
    warned = False
    while not ended.is_set():
        try:
            if has_notice(place):
                request.ask(f"run.stop_when={where}")
                return
        except (OSError, HTTPException) as error:
            # a wrong address must not be noticed only when the machine is gone; a server may also be away for a while
            if not warned:
                log.warning("run.stop_when=%s: no answer (%s); it is asked again every %g s", where, error, _INTERVAL)
            warned = True
        ended.wait(_INTERVAL)


def _is_url(where: str) -> bool:
    return "://" in where


def has_notice(place: str) -> bool:
    """Does the file exist, does the URL answer? 404 is no notice, nor Google's FALSE, nor Azure's empty list of events.

    OSError or HTTPException where there is no answer.
    """
    if not _is_url(place):
        return os.path.exists(place)
    try:
        try:
            answer = _request(Request(place, headers=_HEADERS))
        except HTTPError as error:
            if error.code != 401:
                raise
            address = urljoin(place, _TOKEN_PATH)
            token = _request(Request(address, headers={f"{_TOKEN_HEADER}-ttl-seconds": "60"}, method="PUT")).decode()
            answer = _request(Request(place, headers={_TOKEN_HEADER: token}))
    except HTTPError as error:
        if error.code != 404:
            raise
        return False
    return answer.strip() != b"FALSE" and b'"Events":[]' not in b"".join(answer.split())


def _request(request: Request) -> bytes:
    with _open(request, timeout=_PATIENCE) as answer:
        return answer.read(_MOST)
