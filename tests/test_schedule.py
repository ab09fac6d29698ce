"""Rates: what each schedule makes of a step; torch's schedulers: test_borrowed.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainer import Refusal
from trainer.learning.schedule import WSD, Constant, Cosine, Linear, Schedule, Step

ALL = [Constant, Cosine, Linear, Step, WSD]


def curve(schedule: Schedule, horizon: int = 100) -> list[float]:
    return [schedule(step, 0, horizon) for step in range(horizon)]


@pytest.mark.parametrize("kind", ALL)
def test_a_schedule_warms_up_follows_from_the_step_alone_and_says_whether_the_length_matters(kind: Any) -> None:
    assert curve(kind(warmup=4))[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert kind()(0, 0, 100) == pytest.approx(1.0)
    # a warm-up longer than the run only rises
    rates = curve(kind(warmup=50), horizon=20)
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.4)
    schedule = kind(warmup=3)
    assert [schedule(step, 0, 100) for step in reversed(range(100))][::-1] == curve(kind(warmup=3))
    short, long = curve(schedule, 50), curve(schedule, 200)
    assert schedule.needs_horizon == (short != long[:50])
    assert kind(reference_batch=256).scale(1024) == 4.0
    assert kind().scale(1024) == 1.0


def test_cosine_is_half_a_cosine() -> None:
    rates = curve(Cosine(final=0.1))
    assert rates[50] == pytest.approx(0.55)
    assert rates[25] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert 0.1 < rates[-1] < 0.101
    assert [Cosine(final=0.1)(step, 0, 100) for step in (100, 150)] == pytest.approx([0.1, 0.1])


def test_linear_is_straight_and_a_step_falls_at_its_milestones() -> None:
    assert curve(Linear(final=0.5, warmup=20))[60] == pytest.approx(0.75)
    assert Linear(final=0.5)(100, 0, 100) == pytest.approx(0.5)
    assert Linear(warmup=4, start=0.2)(1, 0, 100) == pytest.approx(0.6)
    assert Linear(final=0.5, warmup=20)(20, 0, 20) == pytest.approx(0.5)
    schedule = Step(milestones=(10, 20), gamma=0.5)
    assert [schedule(step, 0, 100) for step in (9, 10, 19, 20, 1000)] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_wsd_is_stable_and_then_decays() -> None:
    rates = curve(WSD(decay=0.2, final=0.0))
    assert set(rates[:81]) == {1.0}
    assert rates[90] == pytest.approx(0.5)
    assert WSD(decay=0.2)(100, 0, 100) == pytest.approx(0.0)
    assert [WSD(decay=0.2, final=0.5)(step, 0, 100) for step in (90, 100)] == pytest.approx([0.75, 0.5])
    assert set(curve(WSD(decay=0.0))) == set(curve(WSD(decay_steps=0))) == {1.0}
    # in steps: the same, wherever the run ends
    assert curve(WSD(decay_steps=20)) == pytest.approx(rates)
    assert curve(WSD(decay_steps=20), 60)[40:] == curve(WSD(decay_steps=20))[80:]
    # only a decay that has begun depends on the length of the run
    assert not WSD(decay_steps=20).differs(81, 10, 100, 200)
    assert WSD(decay_steps=20).differs(82, 10, 100, 200)
    assert not WSD(decay=0.0).differs(100, 10, 100, 200)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"warmup": -1}, "warmup is -1"),
        ({"warmup": "1epoch"}, "warmup is 1epoch; it counts optimizer steps, 0 or more, or epochs"),
        ({"reference_batch": 0}, "reference_batch is 0"),
        ({"decay": 2.0}, "decay is 2"),
        ({"decay_steps": -1}, "decay_steps is -1"),
        ({"final": -0.1}, "final is -0.1; it is a part of the full rate, between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        WSD(**arguments)
