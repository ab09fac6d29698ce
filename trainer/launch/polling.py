"""Waiting: for something that has to be looked for again and again, and for a call that may never return."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_INTERVAL = 0.1  # seconds between two looks, at most; the first ones follow each other faster


def poll(look: Callable[[], T | None], seconds: float, most: float = _INTERVAL) -> T | None:
    """Call `look` again and again until it returns something; None where it has returned nothing after so long.

    most: seconds between two looks.

    The store of torch can wait by itself, but its timeouts leave warnings, and often more than one key is waited for.
    """
    deadline, pause = time.monotonic() + seconds, 0.001
    while (result := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(most, 1.5 * pause)
    return result


def with_timeout(seconds: float, act: Callable[[], T]) -> T:
    """What `act` returns or raises; TimeoutError where it takes longer: the thread in which it hangs is left behind.

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
    waited = 0.0
    while thread.is_alive() and waited < seconds:
        began = time.monotonic()
        thread.join(_INTERVAL)
        # more than that is the sleep of the machine, or of this process
        waited += min(time.monotonic() - began, 2 * _INTERVAL)
    for error in errors:
        raise error
    for result in results:
        return result
    raise TimeoutError("no answer")
