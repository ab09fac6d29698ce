"""Several machines: who is started again by its launcher when another machine leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from trainer.launch import stop_signals
from trainer.launch.rendezvous import Launch
from trainer.launch.stop_signals import stopped_elsewhere_only


@dataclass
class Asked:
    """What a process was asked."""

    reason: str = ""

    @property
    def raised(self) -> bool:
        """Was it?"""
        return bool(self.reason)


def ranks(reasons: list[list[str]], run_id: str = "run") -> list[bool]:
    """Is each rank left behind? `reasons`: of each machine, what each of its processes was asked."""
    flat = [(machine, local, reason) for machine in reasons for local, reason in enumerate(machine)]
    told: list[object] = []

    def tell(word: object) -> list[object]:
        told.append(word)
        return [word]

    launches: list[tuple[Launch, Any]] = [
        (Launch(rank, len(flat), local, len(machine), run_id=run_id), Asked(reason))
        for rank, (machine, local, reason) in enumerate(flat)
    ]
    for launch, asked in launches:  # what each of them has to say
        stopped_elsewhere_only(launch, asked, tell)
    return [stopped_elsewhere_only(launch, asked, lambda _: told) for launch, asked in launches]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(stop_signals, "_REQUEST_SPREAD", 0.0)


@pytest.mark.parametrize(
    ("reasons", "left"),
    [
        ([["SIGTERM", "SIGTERM"], ["SIGTERM", "SIGTERM"]], [False] * 4),  # a change of machines, the end of a job
        ([["", ""], ["the launcher is gone", "the launcher is gone"]], [True, True, False, False]),
        ([["", "SIGTERM"], ["", ""], ["", ""]], [False, False, True, True, True, True]),
        ([["", ""], ["", ""]], [False] * 4),  # run.stop_after
        ([["", "SIGTERM"]], [False] * 2),  # one machine
    ],
)
def test_a_machine_that_nobody_asked_is_left_behind_by_one_that_was(reasons, left):
    assert ranks(reasons) == left


def test_where_nothing_restarts_a_process_it_stops_as_asked():
    assert ranks([["", ""], ["SIGTERM", "SIGTERM"]], run_id="") == [False] * 4
