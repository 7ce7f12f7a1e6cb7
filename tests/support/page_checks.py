"""A report's page in headless Chromium: its width, the contrast of its texts and its requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LEAST_CONTRAST, LEAST_OF_LARGE = 4.5, 3.0  # WCAG 2.2, level AA
# Elements that reach past the window, outside boxes that scroll; in print no box scrolls.
TOO_WIDE = """(printed) => {
  const width = document.documentElement.clientWidth;
  const found = [];
  for (const one of document.body.querySelectorAll("*")) {
    if (!printed && one.parentElement.closest(".scroll")) continue;
    if (one.ownerSVGElement) continue;
    const box = one.getBoundingClientRect();
    if (box.right > width + 1 || box.left < -1)
      found.push(`${one.tagName}.${one.getAttribute("class")} reaches ${box.right} of ${width}`);
  }
  if (document.documentElement.scrollWidth > width)
    found.push(`the page is ${document.documentElement.scrollWidth} wide, the window ${width}`);
  return found;
}"""
# Text in plots that reaches out of its picture.
CUT_OFF = """() => {
  const found = [];
  for (const picture of document.querySelectorAll("figure svg")) {
    const frame = picture.getBoundingClientRect();
    for (const text of picture.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      const over = Math.max(frame.left - box.left, box.right - frame.right,
                            frame.top - box.top, box.bottom - frame.bottom);
      if (over > 2)
        found.push(`"${text.textContent}" is cut off in ${picture.getAttribute("aria-label")}`);
    }
  }
  return found;
}"""
# Texts with too little contrast to what is painted behind them.
PALE = """([least, leastOfLarge]) => {
  const parse = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    return parts.length < 4 ? [...parts, 1] : parts;
  };
  const over = (top, below) =>
    [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (one) => {
    const layers = [];
    for (let at = one; at; at = at.parentElement)
      layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((value) => value / 255).map(
      (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || one.tagName === "STYLE") continue;
    if (one.tagName === "style" || !one.getClientRects().length) continue;
    const style = getComputedStyle(one);
    const colour = parse(one.ownerSVGElement ? style.fill : style.color);
    const below = behind(one);
    const [a, b] = [light(over(colour, below)), light(below)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (contrast < (large ? leastOfLarge : least))
      found.push(`${contrast.toFixed(1)}: ${walk.currentNode.textContent.trim().slice(0, 40)}`);
  }
  return found;
}"""


@contextmanager
def opened(
    browser: Any, file: Path, width: int, scheme: str, *, printed: bool = False
) -> Iterator[tuple[Any, list[str]]]:
    """Open a page in a window; yield it and the addresses that it asked for besides its file.

    width: of the window, in pixels. scheme: light | dark.
    """
    window = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        page, asked = window.new_page(), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        if printed:
            page.emulate_media(media="print")
        page.goto(file.as_uri())
        page.wait_for_load_state("load")
        asked.remove(file.as_uri())
        yield page, asked
    finally:
        window.close()


def faults(page: Any, asked: list[str], *, printed: bool = False) -> list[str]:
    """Return what is wrong with an opened page: too wide, cut off, pale, or not self-contained."""
    return [
        *page.evaluate(TOO_WIDE, printed),
        *page.evaluate(CUT_OFF),
        *page.evaluate(PALE, [LEAST_CONTRAST, LEAST_OF_LARGE]),
        *(f"asked for {address}" for address in asked),
    ]
