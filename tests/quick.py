"""On its way out: see tests/run.py."""

from tests.run import quickly as quickly
