"""A browser, and axe-core, which checks the accessibility of pages; or the reason for a skip."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
AXE = Path(sys.prefix, "axe-core", "axe.min.js")
REMEDY = "make browser installs it"


@dataclass
class Visit:
    """A page that is open in the browser, with its console output and its requests."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def find_violations(self) -> list[str]:
        """Return the findings of axe-core: a rule and its elements."""
        # A script tag would be blocked by the content security policy of a page.
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("axe.run()")["violations"]
        return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]

    @property
    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@dataclass
class Browser:
    """A browser without a window."""

    chromium: Any

    def visit(self, address: Path | str, *, width: int = 1280, scheme: str = "light") -> Visit:
        """Open a file or an address in a new window of this width."""
        size = {"width": width, "height": 800}
        visit = Visit(self.chromium.new_page(viewport=size, color_scheme=scheme))
        visit.page.on("console", lambda message: visit.messages.append(message.text))
        visit.page.on("pageerror", lambda error: visit.messages.append(str(error)))
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.goto(address if isinstance(address, str) else address.as_uri())
        return visit


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start Chromium, or skip the test and report what is missing."""
    api = pytest.importorskip("playwright.sync_api", reason=f"needs playwright: {REMEDY}")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("needs Chromium: install the package chromium")
    if not AXE.is_file():
        pytest.skip(f"needs axe-core in {AXE.parent}: {REMEDY}")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield Browser(chromium)
        chromium.close()
