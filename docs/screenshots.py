"""Make the screenshot of the README from a real run: make screenshots.

The script trains MiniLM on the bundled questions, unless it has done so before. Their texts may be
published. It opens the report in Chromium, which make browser installs.
"""

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import finetune
from finetune.commands.report import report

RUN = Path("runs/questions-minilm-full")
PICTURE = Path(__file__).parent / "screenshots" / "report.png"
WIDTH, HEIGHT = 1000, 1130
# With a palette, the file has a third of its size, and looks the same.
COLORS = 96


def main() -> None:
    """Train the model if needed, and save the top of its report as a PNG."""
    if not RUN.exists():
        finetune.run(data="questions", model="minilm", output_dir=str(RUN))
    address = report(RUN).resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1.5
        )
        page.goto(address)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        browser.close()
    PICTURE.parent.mkdir(exist_ok=True)
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
