"""What a language model has learned so far, for people: after each evaluation it continues a text."""

from __future__ import annotations

from trainer.data.data import Data
from trainer.data.seeded_items import put_back
from trainer.learning.generation_request import Continuation
from trainer.parallel.compiling import uncompiled
from trainer.records.sinks import Log
from trainer.strategies.parallel_model import Placed


class NoSample:
    """Nobody asked for one."""

    def show(self, placed: Placed, step: int) -> None:
        """The evaluation of this step is done."""


class Sample(NoSample):
    """Continues one text again and again, on the main rank, which has the whole network and the sinks."""

    def __init__(self, asked: Continuation, data: Data, log: Log) -> None:
        self._asked, self._data, self._log = asked, data, log

    def show(self, placed: Placed, step: int) -> None:
        """Write the text, for the sinks that show it; training goes on as if nobody had."""
        place = placed.strategy
        if not place.world.is_main:  # the others wait for it where they next meet
            return
        # one token after the other: nothing that was compiled for a step has these sizes
        with put_back(), uncompiled(), place.machine.autocast(place.device):
            self._log.sample(self._asked.text(placed.network, self._data, place.device), step)
