"""What travels in a step, counted."""

import pytest

from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.counting import collectives_of_a_step
from tests.strategies.toys import BATCH, Case


@pytest.mark.parametrize("task", quickly(["plain", "weighted"], "weighted"))
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


# strategy → (processes, its fields, how often a gradient and a new value travel), of what the network's parts have:
# what is split or spread over ranks is frozen, so a rank holds all of what learns
@pytest.mark.parametrize(("strategy", "times"), [("ddp", 1), ("zero1", 2)])
def test_of_what_is_frozen_nothing_travels(processes: Processes, strategy: str, times: int) -> None:
    learns = 12 + 12 + 12 * 4 + 4
    sent = processes.run(2, collectives_of_a_step, Case(strategy, network="frozen"))[0]
    whole = processes.run(2, collectives_of_a_step, Case(strategy))[0]
    frozen = 12 * 24 + 24 + 24 * 12 + 12
    assert sum(size for _, size in whole) - sum(size for _, size in sent) >= times * 4 * frozen
    assert 4 * times * learns <= sum(size for _, size in sent) < 4 * times * learns + 100


def test_of_what_is_frozen_copies_of_a_split_network_average_nothing(processes: Processes) -> None:
    sent = processes.run(4, collectives_of_a_step, Case("ddp_tp", {"tensor": 2}, network="frozen"))[0]
    learns, activations = 4 * (12 + 12 + 12 * 4 + 4), 4 * BATCH // 2 * 12
    # over the copies; between tensor ranks, which hold it in common (bytes, counted as numbers); forward, not backward
    assert [size for _, size in sent if size > 16] == [learns, activations, 4 * learns]


def test_fsdp_gathers_what_is_frozen_and_sends_no_gradient_of_it(processes: Processes) -> None:
    def gradients(network: str) -> int:
        sent = processes.run(2, collectives_of_a_step, Case("fsdp", network=network))[0]
        return sum(size for name, size in sent if "reduce" in name)

    assert gradients("net") - gradients("frozen") >= 4 * (12 * 24 + 24 + 24 * 12 + 12)


def test_one_process_sends_nothing(processes: Processes) -> None:
    assert processes.run(1, collectives_of_a_step, Case("single")) == [[]]


@pytest.mark.parametrize("strategy", quickly(["ddp", "fsdp"], "ddp"))  # zero1 sends each owner its own
def test_a_step_has_as_many_collectives_however_many_ranks_there_are(processes: Processes, strategy: str) -> None:
    two, four = (processes.run(n, collectives_of_a_step, Case(strategy))[0] for n in (2, 4))
    assert [name for name, _ in two] == [name for name, _ in four]
