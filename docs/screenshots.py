"""Make the example report, and screenshots of it and of the pages of serve and label.

``make screenshots`` runs this script. It trains MiniLM on the bundled questions, unless it has done
so before. Their texts may be published. It opens the pages in Chromium, which ``make browser``
installs.
"""

import io
import json
import re
import shutil
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import finetune
from finetune.commands.report import report

RUN = Path("runs/questions-minilm-full")
PICTURES = Path(__file__).parent / "screenshots"
EXAMPLE = Path(__file__).parent / "example-report.html"
QUESTION = "How many moons does Mars have?"
LABELS = 60
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


def save_labeling(page: Any) -> None:
    """Save the page of label after some texts were labeled."""
    with as_file(files("finetune.data") / "questions.jsonl") as path:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    topics = {row["text"]: row["label"] for row in rows}
    classes = sorted({*topics.values()})
    with TemporaryDirectory() as folder:
        (Path(folder) / "questions.txt").write_text("\n".join(topics))
        arguments = ["label", "questions.txt", "--model", "minilm", "--classes", ",".join(classes)]
        command = [sys.executable, "-m", "finetune", *arguments, "--no-browser", "--json"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            page.goto(json.loads(server.stdout.readline())["address"])
            ready = re.compile(r"texts labeled\.$")  # features are computed for all of them
            page.locator("#progress", has_text=ready).wait_for(timeout=120_000)
            for number in range(1, LABELS + 1):
                text = page.locator("#text .text").inner_text()
                page.keyboard.press(str(1 + classes.index(topics[text])))
                page.locator("#progress", has_text=re.compile(rf"^{number} of")).wait_for()
                page.locator("body:not([data-busy])").wait_for()
            save(page, "labeling")
            server.terminate()


def main() -> None:
    """Train the model if needed, and save the pages."""
    if not RUN.exists():
        finetune.run(data="questions", model="minilm", output_dir=str(RUN))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, height in (("report", 1150), ("serving", 640), ("labeling", 900)):
            size = {"width": 1000, "height": height}
            page = browser.new_page(viewport=size, device_scale_factor=1.5)
            if name == "serving":
                save_served(page)
            elif name == "labeling":
                save_labeling(page)
            else:
                shutil.copyfile(report(RUN), EXAMPLE)
                page.goto(f"{EXAMPLE.resolve().as_uri()}#classes")
                save(page, name)
        browser.close()


if __name__ == "__main__":
    main()
