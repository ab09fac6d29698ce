"""The processes of a run, as the files of a run see them: acting together, failing together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException


class Ranks(Protocol):
    """All that a checkpoint needs to know about the processes it is shared by."""

    @property
    def is_main(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def barrier(self) -> None: ...
    def share(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Alone:
    """One process by itself."""

    is_main: bool = True
    rank: int = 0
    world_size: int = 1

    def barrier(self) -> None:
        """Everybody is here."""

    def share(self, value: Any) -> list[Any]:
        """Everybody's value."""
        return [value]


def together(ranks: Ranks, action: Callable[[], Any], failure: type[Exception]) -> list[Any]:
    """What the action returned on each rank, in rank order; where it failed on one, `failure` on all. Collective."""
    cause, mine = None, {}
    try:
        mine["value"] = action()
    except (Exception, CheckpointException) as error:
        cause = _root(error)
        mine["error"] = str(cause) if isinstance(cause, (failure, OSError)) else f"{type(cause).__name__}: {cause}"
    results = ranks.share(mine)
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise failure(errors[0]) from cause
    return [result["value"] for result in results]


def _root(error: BaseException) -> BaseException:
    """The error itself, out of the parcel in which torch hands it to all ranks."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
