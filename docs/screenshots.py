"""Make the README's screenshots from a real run: make screenshots.

MiniLM is trained on the questions of the package, whose texts may be shown to everybody, unless
that was done before. Its report is opened in Chromium, which make browser installs.
"""

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import finetune
from finetune.commands.report import report

RUN = Path("runs/questions-minilm-last-2")
FOLDER = Path(__file__).parent / "screenshots"
# A palette makes a file of flat colours a third of its size, and nobody sees the difference.
COLOURS = 96


def main() -> None:
    """Train, unless that was done, and take the pictures."""
    if not RUN.exists():
        finetune.run(data="questions", model="minilm", train_layers=2, output_dir=str(RUN))
    page = report(RUN).resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        take(browser, page, "report", size=(1000, 1130))
        take(browser, f"{page}#confusion", "report-dark", size=(1000, 1130), scheme="dark")
        browser.close()


def take(
    browser: Browser, address: str, name: str, *, size: tuple[int, int], scheme: str = "light"
) -> None:
    """Save what a window of so many pixels shows of a page, as a PNG with few colours."""
    window = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=window, color_scheme=scheme, device_scale_factor=1.5)
    page.goto(address)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    FOLDER.mkdir(exist_ok=True)
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)
    page.close()


if __name__ == "__main__":
    main()
