"""The plain loop with which a proof tries whose a difference is: it must itself be what one process does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests import test_verify
from tests.commands import TRANSFORMER
from tests.processes import Processes
from tests.quick import quickly
from tests.test_verify import IMAGES, LISTS, NET, verdict, verified
from trainer.launch.rendezvous import Launch
from trainer.verify.plain_loop import Variation, run_plain_loop
from trainer.verify.short_run import initial_progress

pytestmark = pytest.mark.slow
home = test_verify.home  # the fixture

TOKENS = ["data=synthetic_tokens", "data.length=16", "task=language", "model=gpt_nano", "model.dropout=0"]
NETWORKS: dict[str, list[str]] = {
    "plain": [*NET],
    "clipped": [*NET, "loop.max_norm=0.1", "optimizer=sgd"],
    "transformer": [*TRANSFORMER, "model.dropout=0", "loop.global_batch=24"],
    "tokens": [*TOKENS, "loop.global_batch=8"],
    "lists": [*NET, *LISTS, "data=listed"],
    "graphs": [*NET, "model=of_nodes", "data=triples"],
    "low_rank": [*NET, "+model.kind=low_rank"],
    "narrow": [*NET, "+model.kind=narrow"],
    "mixed": ["model=mlp", "loop.global_batch=24", "data=synthetic_images", "data.size=96", "data.augment.mixup=0.2"],
    "warm-up": [*NET, "schedule=cosine", "schedule.warmup=2", "optimizer.weight_decay=0.1"],
    "norms": ["model=torchvision", "model.name=resnet18", *IMAGES],
}


def by_itself(launch: Launch, place: Path, words: list[str], how: Variation) -> tuple[Any, str]:
    """What a proof says of the plain loop, in the place of the product's own."""

    def trial(run: Any, record: Any, ends: Sequence[int], *rest: Any, **more: Any) -> bool:
        own, drawn = run_plain_loop(run, record.layouts, initial_progress(run, ends[-1]), ends, ends[-1], how)
        record.values, record.facts["heard"] = own.values, []
        assert not drawn
        return True

    with patch("trainer.verify.job.train_and_record", trial):
        return verified(launch, place, words)


@pytest.mark.long
@pytest.mark.parametrize("name", quickly(NETWORKS, "plain"))
def test_whole_or_divided_the_plain_loop_does_what_one_process_does(
    processes: Processes, home: Path, name: str
) -> None:
    ways = [Variation(), Variation(recreates=True), Variation(hides_processes=False), Variation(3, 2)]
    for how in ways[:-1] if name == "norms" else ways:
        said = verdict(processes, home, 1, NETWORKS[name], [], partial(by_itself, how=how))
        assert said.startswith("SAME: single on 1, 3 steps, "), f"{how}\n{said}"
