"""`job=verify` of networks that are right and out of the ordinary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import test_verify
from tests.processes import Processes
from tests.quick import quickly
from tests.test_verify import NET, verdict

pytestmark = pytest.mark.slow
home = test_verify.home  # the fixture

RIGHT = [("versioned", ["fsdp"]), ("versioned", ["pp"])]
RIGHT += [("in_place", ["fsdp"]), ("in_place", ["ddp", "strategy.activation_checkpointing=units"])]


@pytest.mark.parametrize(("kind", "strategy"), quickly(RIGHT, RIGHT[0]))
def test_nothing_is_found(processes: Processes, home: Path, kind: str, strategy: list[str]) -> None:
    words = [*NET, f"+model.kind={kind}"]
    said = verdict(processes, home, 2, words, [f"strategy={strategy[0]}", *strategy[1:]])
    assert said.startswith(f"SAME: {strategy[0]} on 2, "), said
