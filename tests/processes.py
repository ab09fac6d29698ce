"""On its way out: see tests/ranks.py."""

from tests.ranks import Processes as Processes
