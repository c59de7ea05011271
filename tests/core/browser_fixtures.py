"""The browser that a file's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import NO_BROWSER, Browser, find_chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(NO_BROWSER)
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
