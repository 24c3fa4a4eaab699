"""A browser with axe-core, which checks the accessibility of pages. Skips if one is missing."""

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
    """An open page, with its console output and requests."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def find_violations(self) -> list[str]:
        """Return the axe-core findings, each a rule and its elements."""
        # The content security policy of the pages would block a script tag.
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("axe.run()")["violations"]
        return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]

    @property
    def overflow(self) -> int:
        """How many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@dataclass
class Browser:
    """A browser without a window."""

    chromium: Any

    def visit(self, target: Path | str, *, width: int = 1280, scheme: str = "light") -> Visit:
        """Open a file or a URL in a new window of this width."""
        size = {"width": width, "height": 800}
        visit = Visit(self.chromium.new_page(viewport=size, color_scheme=scheme))
        visit.page.on("console", lambda message: visit.messages.append(message.text))
        visit.page.on("pageerror", lambda error: visit.messages.append(str(error)))
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.goto(target if isinstance(target, str) else target.as_uri())
        return visit


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start Chromium, or skip the test and report the missing package."""
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
