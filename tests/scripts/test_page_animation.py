"""The recording of the page: its size, its times, and a recording in headless Chromium."""

import io
import random
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from decoding.errors import UserError
from scripts import page_animation as script
from scripts.page_animation import MOST_BYTES, Options, Picture, make_gif, run

SIZE = (160, 120)


def noise(seed: int) -> Image.Image:
    return Image.frombytes("RGB", SIZE, random.Random(seed).randbytes(SIZE[0] * SIZE[1] * 3))


def text_of(count: int) -> Image.Image:
    """Return a page whose text has this many green words."""
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    for number in range(count):
        draw.rectangle((5 + 12 * number, 20, 14 + 12 * number, 30), fill=(187, 240, 207))
    return image


def read(content: bytes) -> tuple[list[int], list[Image.Image]]:
    """Return the milliseconds and the pictures of an animation."""
    times, images = [], []
    with Image.open(io.BytesIO(content)) as found:
        for number in range(found.n_frames):
            found.seek(number)
            times.append(found.info["duration"])
            images.append(found.convert("RGB"))
    return times, images


def test_an_animation_has_the_pictures_at_their_times() -> None:
    pictures = [Picture(at, text_of(n)) for n, at in enumerate((3.0, 3.2, 3.7, 4.0))]
    times, images = read(make_gif(pictures))
    assert times == [200, 500, 300, script.HOLD_MS]
    for found, picture in zip(images, pictures, strict=True):
        assert found.tobytes() == picture.image.tobytes(), "few colours are kept as they are"


def test_a_large_animation_gets_fewer_colours_and_pictures() -> None:
    pictures = [Picture(n / 5, noise(n)) for n in range(8)]
    whole = make_gif(pictures)
    small = make_gif(pictures, most_bytes=len(whole) * 2 // 3)
    fewer = make_gif(pictures, most_bytes=len(whole) * 2 // 5)
    assert len(whole) <= MOST_BYTES and len(small) < len(whole)
    assert len(read(whole)[0]) == len(read(small)[0]) == 8 > len(read(fewer)[0])
    assert sum(read(fewer)[0]) == sum(read(whole)[0]), "at the same speed"
    with pytest.raises(UserError, match="bytes, expected at most 1,000. Set fewer tokens"):
        make_gif(pictures, most_bytes=1000)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("playwright", r"playwright is not installed. Run pip install -e '\.\[browser\]'"),
        ("gradio", r"gradio is not installed. Run pip install -e '\.\[web\]'"),
        ("", "none of chromium, chromium-browser, google-chrome is on the PATH"),
    ],
)
def test_what_is_missing_is_named(
    missing: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        script.importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=words):
        run(Options())


@pytest.mark.long
def test_the_page_is_recorded(chromium: Path, embedded_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.gif"
    options = Options(target=str(embedded_target), tokens=24, out=str(out))
    done = run(options)
    assert done.startswith(f"{out}: ") and 0 < out.stat().st_size <= MOST_BYTES
    times, images = read(out.read_bytes())
    assert len(images) > 2 and sum(times) > script.HOLD_MS
    assert {image.size for image in images} == {images[-1].size}
    green = (187, 240, 207)  # of drafted and accepted tokens, in the legend too
    first, last = (
        sum(count for count, colour in images[at].getcolors(1 << 24) if colour == green)
        for at in (0, -1)
    )
    assert images[0].tobytes() != images[-1].tobytes() and last >= first > 0


@pytest.mark.long
def test_errors_of_the_page_end_the_recording(
    chromium: Path, embedded_target: Path, tmp_path: Path
) -> None:
    given = {"target": str(embedded_target), "tokens": 8}
    with pytest.raises(UserError, match="the page shows an error: .*the prompt is empty"):
        run(Options(**given, prompt=" ", out=str(tmp_path / "page.gif")))
    with pytest.raises(UserError, match="serving.web ended before it listened: .*nowhere"):
        run(Options(target="nowhere/at all", out=str(tmp_path / "page.gif")))
    with pytest.raises(UserError, match="does not exist. Make it first"):
        run(Options(**given, out=str(tmp_path / "missing" / "page.gif")))
    assert not list(tmp_path.iterdir())
