from __future__ import annotations

import pytest

from tests.ranks import Processes
from tests.strategies.runs import Train


@pytest.fixture(scope="session")
def train(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains toys; what has been trained once in a session is remembered."""
    return Train(tmp_path_factory.mktemp("toys"))
