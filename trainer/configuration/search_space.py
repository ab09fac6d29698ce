"""What the words of a sweep may be, and the runs that come of it: one for each combination, or as something chooses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from trainer.messages import Refusal

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Trial:
    """One run of several: its number, the name of its folder, the words that make it, and what differs in them."""

    number: int
    name: str
    words: tuple[str, ...]
    values: dict[str, str]


@dataclass(frozen=True)
class Choice:
    """A word that is one of these; as a rule there is one only."""

    key: str
    words: tuple[str, ...]

    @property
    def written(self) -> str:
        """All of it as one word."""
        return self.words[0] if len(self.words) == 1 else f"{self.key}={','.join(self.values)}"

    @property
    def values(self) -> list[str]:
        """What may stand behind the key."""
        return [word.partition("=")[2] for word in self.words]

    def listed(self) -> tuple[str, ...]:
        """All that it may be."""
        return self.words

    extremes = listed

    def distribution(self) -> BaseDistribution:
        """The same for Optuna."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.words)

    def word(self, chosen: str) -> str:
        """What Optuna has chosen, as a word."""
        return chosen


@dataclass(frozen=True)
class Between:
    """A number between two, both included: `interval(1e-4,1e-1)`."""

    key: str
    low: float
    high: float
    whole: bool  # int(interval(1,8)): whole numbers
    log: bool  # tag(log,interval(1e-4,1e-1)): as many below 1e-3 as above 1e-2
    written: str  # the word as it was typed

    def listed(self) -> tuple[str, ...]:
        """Refusal: there is no end of them."""
        raise Refusal(
            f"{self.written}: these values cannot be listed; write a,b,c or range(1,4), or let Optuna choose:"
            " hydra/sweeper=optuna"
        )

    def extremes(self) -> tuple[str, ...]:
        """The words at both ends."""
        return self.word(self.low), self.word(self.high)

    def distribution(self) -> BaseDistribution:
        """The same for Optuna."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def word(self, chosen: float) -> str:
        """What Optuna has chosen, as a word."""
        return f"{self.key}={chosen!r}"


Axis = Choice | Between


@dataclass(frozen=True)
class Space:
    """All words of a sweep, each with what it may be."""

    always: tuple[str, ...]  # what a run's words begin with: folders of labs, the configuration's name
    axes: tuple[Axis, ...]

    @property
    def several(self) -> list[Axis]:
        """The words that differ from run to run."""
        return [axis for axis in self.axes if len(axis.extremes()) > 1]

    def grid(self) -> tuple[Trial, ...]:
        """Every combination of values, the last word's changing fastest. Refusal where they cannot be counted."""
        every = product(*(axis.listed() for axis in self.axes))
        return tuple(self.trial(number, picked) for number, picked in enumerate(every))

    def samples(self) -> Iterator[Trial]:
        """As few runs as have every value once, or both ends of what has no list."""
        values = [axis.extremes() for axis in self.axes]
        for index in range(max(map(len, values), default=1)):
            yield self.trial(index, [one[index % len(one)] for one in values])

    def trial(self, number: int, picked: Sequence[str]) -> Trial:
        """The run of these words, one an axis."""
        differ = {axis.key for axis in self.several}
        told = {axis.key: word for axis, word in zip(self.axes, picked, strict=True) if axis.key in differ}
        # A folder is named by what differs; where nothing does, by all words but those that say where it is.
        telling = list(told.values()) or [word for word in picked if not word.startswith("run.")]
        # Without what a path or a shell would read as something else.
        plain = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", ",".join(map(brief, telling)))
        values = {key.lstrip("+"): word[len(key) + 1 :] for key, word in told.items()}
        return Trial(number, f"{number}_{plain}"[:200].rstrip("_"), (*self.always, *picked), values)


def brief(text: str) -> str:
    """A text whose long fractions have four digits: what Optuna chooses has seventeen."""
    long = r"\b(?=[\d.e+-]{9})\d+\.\d+(e[+-]?\d+)?"
    return re.sub(long, lambda each: f"{float(each[0]):.4g}", text)
