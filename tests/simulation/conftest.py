from __future__ import annotations

import pytest

DEFAULT_SEEDS = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=DEFAULT_SEEDS, help="how many seeded runs of the simulated cluster")
    parser.addoption("--first-seed", type=int, default=0, help="the first of them")
