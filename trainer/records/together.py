"""Acting together, failing together: what goes wrong on one rank goes wrong on all."""

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from trainer.parallel.ranks import Ranks


def together(ranks: Ranks, action: Callable[[], Any], failure: type[Exception]) -> list[Any]:
    """What the action returned on each rank, in rank order; where it failed on one, `failure` on all. Collective."""
    cause, mine = None, {}
    try:
        mine["value"] = action()
    except (Exception, CheckpointException) as error:
        cause = _root(error)
        mine["error"] = str(cause) if isinstance(cause, (failure, OSError)) else f"{type(cause).__name__}: {cause}"
    results = ranks.all_gather_values(mine)
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise failure(errors[0]) from cause
    return [result["value"] for result in results]


def _root(error: BaseException) -> BaseException:
    """The error itself, out of the parcel in which torch hands it to all ranks."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
