"""Waiting for what nobody announces, and for what may never return."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_INTERVAL = 0.1  # seconds between two looks, at most; the first follow one another faster


def poll(look: Callable[[], T | None], seconds: float) -> T | None:
    """Look again and again until there is something to see; None where there is nothing after so long.

    Not the store's own waiting: its timeouts leave warnings, and often more than one key is watched.
    """
    deadline, pause = time.monotonic() + seconds, 0.001
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(_INTERVAL, 1.5 * pause)
    return found


def with_timeout(seconds: float, act: Callable[[], T]) -> T:
    """What `act` returns or raises; TimeoutError where it takes longer: its thread, which asks what hangs, is left.

    Time counts only while this process runs: a thread that had no turn was not too slow.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(act())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="what may never return", daemon=True)
    thread.start()
    lived = 0.0
    while thread.is_alive() and lived < seconds:
        began = time.monotonic()
        thread.join(_INTERVAL)
        lived += min(time.monotonic() - began, 2 * _INTERVAL)
    for error in errors:
        raise error
    for result in results:
        return result
    raise TimeoutError("no answer")
