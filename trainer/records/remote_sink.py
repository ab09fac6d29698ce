"""Sinks whose other end is a service elsewhere: it may be slow or gone, and the run goes on all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread

from trainer.records.sinks import Sink
from trainer.refusal import Refusal, first_line

_PATIENCE = 30.0  # seconds that the end of a run waits for a service
_SAID = 150  # letters of an error: some packages put a whole conversation into one line
_console = logging.getLogger(__name__)  # the screen and the log file, from any thread


class Service(Sink):
    """Calls to a service, one after the other in a thread of their own; of those that fail the first is told."""

    def __init__(self, name: str) -> None:
        """`name`: of the package that speaks to it, and of the extra that brings that. Refusal where it is missing."""
        # looked for and not imported, which takes seconds and concerns the main rank alone; a folder of that name in
        # the present one, such as wandb leaves, is no package
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise Refusal(
                f"log=[{name}] needs the package {name}: pip install -e '.[{name}]'; or leave {name} out: log=[console]"
            )
        self._name, self._told = name, False
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def later(self, call: Callable[[], object]) -> None:
        """Make this call after those before it. The run does not wait for it."""
        self._calls.put(call)
        # a daemon: a call that hangs must not keep the process
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def idle(self) -> bool:
        """Does no further call wait behind the present one?"""
        return self._calls.empty()

    def guarded(self, call: Callable[[], object]) -> bool:
        """Make this call now; False where it failed."""
        try:
            call()
        except Exception as error:  # whatever a package makes of a network that is gone, or of a key that is wrong
            if not self._told:
                why = first_line(error).rstrip(".")[:_SAID]
                self.tell(f"{why}; the run continues, and its metrics are in metrics.jsonl")
            self._told = True
            return False
        return True

    def tell(self, fact: str) -> None:
        """Say something about the service where people look."""
        _console.warning("note        %s: %s", self._name, fact)

    def close(self) -> None:
        """Wait until all calls have been made, unless the service does not answer."""
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self.tell(f"no answer for {_PATIENCE:g} s; all metrics are in metrics.jsonl")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self.guarded(call)
