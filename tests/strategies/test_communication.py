"""What travels in a step, counted."""

import pytest

from tests.processes import Processes
from tests.strategies.counting import collectives_of_a_step
from tests.strategies.toys import Case


@pytest.mark.parametrize("task", ["plain", "weighted"])
def test_four_micro_batches_of_ddp_send_what_one_sends(processes: Processes, task: str) -> None:
    case = Case("ddp", task=task)
    (one, *_), (four, *_) = (processes.run(2, collectives_of_a_step, case.but(micro_batches=n)) for n in (1, 4))
    assert one
    assert one == four


def test_ddp_sends_every_gradient_once(processes: Processes) -> None:
    parameters = 12 * 24 + 24 + 24 * 12 + 12 + 12 + 12 + 12 * 4 + 4
    sent = processes.run(2, collectives_of_a_step, Case("ddp"))[0]
    assert sum(size for _, size in sent) == 4 * parameters


def test_ddp_tp_sends_gradients_once_whatever_the_slices(processes: Processes) -> None:
    case = Case("ddp_tp", {"tensor": 2})
    (one, *_), (four, *_) = (processes.run(4, collectives_of_a_step, case.but(micro_batches=n)) for n in (1, 4))
    gradients = 4 * (
        12 * 12 + 12 + 12 * 12 + 12 + 12 + 12 + 12 * 4 + 4
    )  # a rank's half of `up` and `down`, the rest whole
    assert [size for _, size in one].count(gradients) == [size for _, size in four].count(gradients) == 1
    # what is left are activations inside a copy: four of a quarter each
    assert sum(size for _, size in one) == sum(size for _, size in four)


def test_one_process_sends_nothing(processes: Processes) -> None:
    assert processes.run(1, collectives_of_a_step, Case("single")) == [[]]
