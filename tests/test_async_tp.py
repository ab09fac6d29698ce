"""Asynchronous tensor parallelism: where it is refused, and that the switch is set for the run alone."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.processes import Processes
from tests.strategies.toys import Net, Plain
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.compile import CompileSettings
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine
from trainer.strategies.mesh import mesh
from trainer.strategies.tp import TP


@pytest.mark.parametrize(
    ("make", "kind", "compile", "local", "said"),
    [
        (FSDP, "cuda", True, 4, "there is one tensor rank, which sends nothing"),
        (TP, "xpu", True, 4, "not for xpu"),
        (TP, "cuda", False, 4, "use compile.mode=default"),
        (TP, "cuda", True, 2, "a machine has 2 processes; use strategy.tensor=2"),
        (TP, "cuda", True, 4, "GPU 0 cannot read the memory of GPU 1"),
    ],
)
def test_it_is_refused_where_nothing_can_do_it(make: Any, kind: str, compile: bool, local: int, said: str) -> None:
    machine = Machine(launch=Launch(0, 4, local_world_size=local), compile=CompileSettings() if compile else None)
    strategy = make(machine=machine, async_tp=True)
    with (
        patch("trainer.strategies.machine.accelerator_type", lambda: kind),
        patch("trainer.strategies.multi_process.refuse_backend", lambda *_: None),
        patch("torch.cuda.device_count", lambda: 2),
        patch("torch.cuda.can_device_access_peer", lambda *_: False),
        pytest.raises(Refusal, match=said),
    ):
        strategy.check(Plain(), Net(), 4)


def switched(launch: Launch) -> list[bool]:
    """Torch's switch before, in and after a strategy."""
    import torch._inductor.config as config

    seen = [config._micro_pipeline_tp]
    with mesh(Machine(launch=launch), tensor=2, async_tp=True):
        seen.append(config._micro_pipeline_tp)
    return [*seen, config._micro_pipeline_tp]


def test_the_switch_is_set_for_the_run_alone(processes: Processes) -> None:
    assert processes.run(2, switched) == [[False, True, False]] * 2


def trained(launch: Launch, asked: bool) -> list[float]:
    """Losses of a compiled decoder, split by sequence over the GPUs."""
    from tests.strategies import toys

    case = toys.Case("tp", {"async_tp": asked}, "gpt sequence", "next", steps=4, device="cuda", backend="nccl")
    with patch("tests.strategies.toys.Machine", lambda **words: Machine(compile=CompileSettings(), **words)):
        return toys.run(launch, case)["losses"]


@pytest.mark.gpu(count=2)
def test_on_gpus_the_curve_stays(processes: Processes) -> None:
    plain, overlapped = processes.run(2, trained, False), processes.run(2, trained, True)
    assert overlapped[0] == pytest.approx(plain[0], rel=1e-3)
