"""Tells at the end of a run which platform did what."""

import pytest

DONE = pytest.StashKey()


def pytest_configure(config):
    config.stash[DONE] = []


@pytest.fixture
def did(request):
    """Call with a platform and what it did."""
    return lambda platform, what: request.config.stash[DONE].append((platform, what))


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[DONE]:
        terminalreporter.section("platforms")
        for platform, what in sorted(config.stash[DONE]):
            terminalreporter.line(f"{platform:24}{what}")
