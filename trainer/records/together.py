"""Acting together, failing together: what goes wrong on one rank goes wrong on all."""

from collections.abc import Callable
from typing import Any

from trainer.parallel.ranks import Ranks


def together(ranks: Ranks, action: Callable[[], Any], failure: type[Exception]) -> list[Any]:
    """What the action returned on each rank, in rank order; where it failed on one, `failure` on all. Collective."""
    cause, mine = None, {}
    try:
        mine["value"] = action()
    except Exception as error:
        cause = error
        mine["error"] = str(error) if isinstance(error, (failure, OSError)) else f"{type(error).__name__}: {error}"
    results = ranks.all_gather_values(mine)
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise failure(errors[0]) from cause
    return [result["value"] for result in results]
