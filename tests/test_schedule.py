import math

import pytest

from trainer.learning.schedule import WSD, Constant, Cosine, Linear, Step
from trainer.refusal import Refusal


def curve(schedule, horizon=100):
    return [schedule(step, horizon) for step in range(horizon)]


ALL = [Constant, Cosine, Linear, Step, WSD]


@pytest.mark.parametrize("kind", ALL)
def test_warmup_rises_evenly_to_the_full_rate(kind):
    assert curve(kind(warmup=4))[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("kind", ALL)
def test_without_warmup_the_first_step_has_the_full_rate(kind):
    assert kind()(0, 100) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ALL)
def test_a_warmup_longer_than_the_run_only_rises(kind):
    rates = curve(kind(warmup=50), horizon=20)
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ALL)
def test_it_depends_on_the_step_alone(kind):
    schedule = kind(warmup=3)
    backwards = [schedule(step, 100) for step in reversed(range(100))]
    assert backwards[::-1] == curve(kind(warmup=3))


@pytest.mark.parametrize("kind", ALL)
def test_needs_horizon_says_whether_another_horizon_is_another_curve(kind):
    schedule = kind(warmup=5)
    short, long = curve(schedule, 50), curve(schedule, 200)
    assert schedule.needs_horizon == (short != long[:50])


def test_cosine_is_half_a_cosine():
    rates = curve(Cosine(final=0.1))
    assert rates[50] == pytest.approx(0.55)
    assert rates[25] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert 0.1 < rates[-1] < 0.101
    assert Cosine(final=0.1)(100, 100) == pytest.approx(0.1)
    assert Cosine(final=0.1)(150, 100) == pytest.approx(0.1)


def test_linear_is_straight():
    rates = curve(Linear(final=0.5, warmup=20))
    assert rates[60] == pytest.approx(0.75)
    assert Linear(final=0.5)(100, 100) == pytest.approx(0.5)
    assert Linear(final=0.5, warmup=20)(20, 20) == pytest.approx(0.5)


def test_step_falls_at_its_milestones():
    schedule = Step(milestones=(10, 20), gamma=0.5)
    assert [schedule(step, 100) for step in (9, 10, 19, 20, 1000)] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_wsd_is_stable_and_then_decays():
    rates = curve(WSD(decay=0.2, final=0.0))
    assert set(rates[:81]) == {1.0}
    assert rates[90] == pytest.approx(0.5)
    assert WSD(decay=0.2)(100, 100) == pytest.approx(0.0)
    assert [WSD(decay=0.2, final=0.5)(step, 100) for step in (90, 100)] == pytest.approx([0.75, 0.5])
    assert set(curve(WSD(decay=0.0))) == {1.0}


def test_the_reference_batch_scales_the_rate():
    assert Cosine(reference_batch=256).scale(1024) == 4.0
    assert Cosine().scale(1024) == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"warmup": -1}, "warmup is -1"),
        ({"reference_batch": 0}, "reference_batch is 0"),
        ({"decay": 2.0}, "decay is 2"),
    ],
)
def test_what_cannot_be_is_refused(arguments, words):
    with pytest.raises(Refusal, match=words):
        WSD(**arguments)
