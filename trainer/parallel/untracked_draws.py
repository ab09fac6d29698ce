"""Draws for rows that are no samples, such as the nodes of graphs: what can be noticed of them."""

from __future__ import annotations


class Strays:
    """Notices draws whose first dimension changes, and not as the number of samples does."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}  # by draw: its rows and the samples, as they were first
        self._facts: list[str] = []

    def look(self, number: int, module: str, rows: int, samples: int) -> None:
        """A draw of so many rows in a micro-batch of so many samples, which are not its rows."""
        before, then = self._first.setdefault(number, (rows, samples))
        if self._facts or rows == before or rows * then == before * samples:
            return
        self._facts.append(
            f"loop.dropout=sample: {module or 'the network'} draws random numbers for {before} rows in one micro-batch"
            f" and for {rows} in another, which are not its {samples} samples. If they are parts of samples that stand"
            " one after the other, as nodes of graphs, the numbers follow from where they stand: the curve depends on"
            " loop.micro_batches and on the processes (docs/one-curve.md)"
        )
        self._told = False

    def heard(self) -> list[str]:
        """What was noticed since it was asked last: one sentence for a run."""
        facts = [] if self._told else list(self._facts)
        self._told = True
        return facts

    _told = True
