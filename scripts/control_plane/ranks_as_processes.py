"""Ranks as real processes: `python -m trainer …` as a launcher starts it, with what it sends counted.

    python -m scripts.control_plane.ranks_as_processes 8 LEDGERS run.dir=… strategy=ddp …

Each rank is a copy of this process, which has imported all that a run needs; it writes what it has counted into
LEDGERS/RANK.json as it ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from scripts.control_plane.counting import Ledger, count_collectives, count_store, make_repeatable
from scripts.control_plane.ranks_as_threads import free_address
from trainer.__main__ import _import_for_ranks, main
from trainer.configuration.compose import compose


def run_as_processes(size: int, words: Sequence[str], ledgers: Path) -> list[int]:
    """Run the program on so many ranks, and wait for them: their exit codes."""
    _import_for_ranks(compose([*words]))
    port = free_address().rpartition(":")[2]
    ledgers.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            _become_rank(rank, size, port, words, ledgers / f"{rank}.json")
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _become_rank(rank: int, size: int, port: str, words: Sequence[str], file: Path) -> NoReturn:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    sys.argv[1:] = words
    ledger, leave = Ledger(), os._exit
    count_store(ledger)
    count_collectives(ledger)
    make_repeatable()

    def write_and_leave(code: int) -> NoReturn:
        file.write_text(json.dumps(ledger.to_json()))
        leave(code)

    setattr(os, "_exit", write_and_leave)  # noqa: B010  # the program ends its process by this
    main()
    raise AssertionError("main has returned")


if __name__ == "__main__":
    sys.exit(max(run_as_processes(int(sys.argv[1]), sys.argv[3:], Path(sys.argv[2]))))
