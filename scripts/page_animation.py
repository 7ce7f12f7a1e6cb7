"""Record the page of serving.web in headless Chromium as an animated GIF.

    python scripts/page_animation.py target=MODEL drafter=FOLDER [KEY=VALUE ...]

A prompt is decoded by the target alone and with the drafter, side by side, on this machine; the
animation runs at the speed of the decoding. It needs Playwright and Gradio (pip install
-e '.[web,browser]') and a Chromium, such as Debian's package. Pictures cost processor
time: on two cores, a third of the speed that the page shows without them.
"""

import importlib.util
import io
import itertools
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from PIL import Image

from decoding.errors import UserError
from jobs.files import write_bytes
from jobs.paths import name_anywhere
from jobs.syntax import quoted
from scripts.options import run_with_options
from scripts.server_process import run_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1080, 900  # of the window; the pictures end below the panes
MOST_BYTES = 2_000_000
COLOURS = (128, 64, 32, 16)
HOLD_MS = 3000  # of the last picture
ENDS = ("finished", "stopped")


@dataclass
class Options:
    """Options of the recording."""

    target: str = "embedded:target"  # model folder or file
    drafter: str = "prompt_lookup"  # folder or name
    prompt: str = "def __eq__(self, other):"
    dtype: str = "float32"  # of the models, as target.dtype of serving.web
    tokens: int = 96  # of the text
    pictures_per_second: float = 5.0
    timeout_s: float = 300.0  # for the whole text
    out: str = "docs/pictures/page.gif"


@dataclass(frozen=True)
class Picture:
    """A picture of the page at a time in seconds."""

    at: float
    image: Image.Image


def check(options: Options) -> Path:
    """Return the path of Chromium. Raises UserError for what is missing, and for wrong values."""
    for module, extra in (("playwright", "browser"), ("gradio", "web")):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{module} is not installed. Run pip install -e '.[{extra}]'.")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise UserError(
            f"none of {', '.join(BROWSERS)} is on the PATH. Install one, such as Debian's package "
            f"chromium."
        )
    if options.tokens < 1 or not options.pictures_per_second > 0:
        raise UserError(
            f"tokens is {options.tokens} and pictures_per_second {options.pictures_per_second:g}, "
            f"expected both above 0."
        )
    return Path(found)


@contextmanager
def run_page(options: Options) -> Iterator[str]:
    """Run serving.web on a free port until the block ends; yield its address."""
    words = [
        f"target.path={quoted(name_anywhere(options.target))}",
        f"target.dtype={options.dtype}",
        f"drafters=[{quoted(name_anywhere(options.drafter))}]",
        f"max_new_tokens={options.tokens}",
    ]
    with run_server("serving.web", *words) as page:
        yield page.url


def record(url: str, chromium: Path, options: Options) -> list[Picture]:
    """Decode the prompt on the page and return its pictures, the finished page last.

    Raises UserError if the page shows an error or does not finish in time.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(url)
        page.get_by_role("button", name="Run").wait_for()
        page.get_by_label("Prompt", exact=True).fill(options.prompt)
        tokens = page.get_by_role("spinbutton", name=re.compile("Tokens"))
        tokens.fill(str(options.tokens))
        tokens.press("Tab")
        try:
            return _pictures(page, options)
        finally:
            browser.close()


def _pictures(page: Any, options: Options) -> list[Picture]:
    """Start the run and take pictures of equal sizes until it has ended."""
    box = page.locator(".sd-race").bounding_box()
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": min(HEIGHT, box["y"] + box["height"] + 16)}

    def picture() -> Picture:
        content = page.screenshot(clip=clip, animations="disabled", caret="hide")
        return Picture(time.monotonic(), Image.open(io.BytesIO(content)).convert("RGB"))

    page.get_by_role("button", name="Run").click()
    began, found = time.monotonic(), [picture()]
    while (status := page.locator(".sd-race").get_attribute("data-status")) not in ENDS:
        errors = page.get_by_test_id("toast-body")
        if errors.count():
            raise UserError(f"the page shows an error: {errors.last.text_content()}")
        if time.monotonic() - began > options.timeout_s:
            raise UserError(
                f"the text did not end within {options.timeout_s:g} s (status {status}). Set "
                f"fewer tokens, or a larger timeout_s."
            )
        due = found[-1].at + 1 / options.pictures_per_second
        page.wait_for_timeout(max(0.0, due - time.monotonic()) * 1000)
        found.append(picture())
    return [*found, picture()]


def make_gif(pictures: Sequence[Picture], most_bytes: int = MOST_BYTES) -> bytes:
    """Return an animation at the pictures' own times, in as many colours as the size allows.

    If even few colours are too many, every second picture is left out. Raises UserError if that
    is too large as well.
    """
    for every in (1, 2):
        kept = [*pictures[:-1][::every], pictures[-1]]
        for colours in COLOURS:
            content = _encode(kept, colours)
            if len(content) <= most_bytes:
                return content
    raise UserError(
        f"the animation has {len(content):,} bytes, expected at most {most_bytes:,}. Set fewer "
        f"tokens or pictures_per_second."
    )


def _encode(pictures: Sequence[Picture], colours: int) -> bytes:
    """Return a GIF whose pictures share the palette of the last one, which has all colours."""
    palette = pictures[-1].image.quantize(colours, dither=Image.Dither.NONE)
    images = [one.image.quantize(palette=palette, dither=Image.Dither.NONE) for one in pictures]
    times = [one.at for one in pictures]
    lasts_ms = [round((b - a) * 1000) for a, b in itertools.pairwise(times)]
    content = io.BytesIO()
    images[0].save(
        content,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=[*(max(20, one) for one in lasts_ms), HOLD_MS],
        loop=0,
        disposal=1,
    )
    return content.getvalue()


def run(options: Options) -> str:
    """Record the page; return what was written in one line."""
    chromium, out = check(options), Path(options.out).expanduser()
    if not out.parent.is_dir():
        raise UserError(f"out={out}: the folder {out.parent} does not exist. Make it first.")
    with run_page(options) as url:
        pictures = record(url, chromium, options)
    content = make_gif(pictures)
    write_bytes(out, content)
    lasts = pictures[-1].at - pictures[0].at
    return f"{out}: {len(pictures)} pictures of {lasts:.1f} s, {len(content):,} bytes"


if __name__ == "__main__":
    run_with_options(run, Options, __doc__)
