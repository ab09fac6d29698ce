"""Mistakes that are planted, of users and of the program itself: what `job=verify` must find, and name.

A run that names a class of this package has the mistake whose name stands in the environment, unless it makes the
reference. `python -m tests.planted` shows one, or all in a table.
"""

from contextlib import ExitStack

from tests.planted import afterwards, copies, draws, experts, mistakes, restarts, shards, stages, steps
from tests.planted.plant import planted, wanted

_PARTS = (copies, shards, stages, draws, steps, restarts, afterwards, experts)
PRODUCT = {name: plant for part in _PARTS for name, plant in part.PLANTS.items()}
PLANTS = {**mistakes.PLANTS, **PRODUCT}

_for_good = ExitStack()
if name := wanted():
    _for_good.enter_context(planted(PLANTS[name]))
