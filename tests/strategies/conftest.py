"""One group of processes for all tests of strategies."""

from collections.abc import Iterator

import pytest

from tests.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    group = Processes()
    yield group
    group.close()
