"""What all ranks do, or none: where it fails on one it fails on all, at once, and nobody waits for the gone."""

from collections.abc import Callable
from typing import Any

from trainer.parallel.ranks import Ranks


def together(ranks: Ranks, action: Callable[[], Any], failure: type[Exception]) -> list[Any]:
    """What the action returned on each rank, in rank order; where it failed on one, `failure` on all. Collective."""
    cause, mine = None, {}
    # whatever happens here, this rank comes to the collective: the others wait for it there
    try:
        mine["value"] = action()
    except Exception as error:
        cause = error
        mine["error"] = str(error) if isinstance(error, (failure, OSError)) else f"{type(error).__name__}: {error}"
    results = ranks.all_gather_values(mine)  # all ranks; each hears the values and errors of all
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise failure(errors[0]) from cause
    return [result["value"] for result in results]
