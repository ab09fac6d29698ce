"""How long a collective may take."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import ProcessGroup


def shorten(groups: Iterable[ProcessGroup | None], timeout: timedelta) -> None:
    """Let collectives of these groups fail after this long."""
