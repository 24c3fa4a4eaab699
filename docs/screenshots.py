"""Make the screenshots of the report and of the page of serve from a real run: make screenshots.

The script trains MiniLM on the bundled questions, unless it has done so before. Their texts may be
published. It opens the pages in Chromium, which make browser installs.
"""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import finetune
from finetune.commands.report import report

RUN = Path("runs/questions-minilm-full")
PICTURES = Path(__file__).parent / "screenshots"
QUESTION = "How many moons does Mars have?"
# With a palette, a file has a third of its size, and looks the same.
COLORS = 96


def save(page: Any, name: str) -> None:
    """Save what a page shows as a PNG."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    PICTURES.mkdir(exist_ok=True)
    picture = picture.quantize(COLORS, dither=Image.Dither.NONE)
    picture.save(PICTURES / f"{name}.png", optimize=True)


def save_served(page: Any) -> None:
    """Save the page of serve with an answer."""
    arguments = ["serve", str(RUN), "--port", "0", "--json"]
    command = [sys.executable, "-m", "finetune", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        page.goto(json.loads(server.stdout.readline())["address"])
        page.fill("#text", QUESTION)
        page.get_by_role("button", name="Classify").click()
        page.locator("#answer *").first.wait_for()
        save(page, "serving")
        server.terminate()


def main() -> None:
    """Train the model if needed, and save the pages."""
    if not RUN.exists():
        finetune.run(data="questions", model="minilm", output_dir=str(RUN))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, height in (("report", 1130), ("serving", 640)):
            size = {"width": 1000, "height": height}
            page = browser.new_page(viewport=size, device_scale_factor=1.5)
            if name == "serving":
                save_served(page)
            else:
                page.goto(report(RUN).resolve().as_uri())
                save(page, name)
        browser.close()


if __name__ == "__main__":
    main()
