"""The HTML that reports are put together from: one page with its own style sheet, no script, no
font, no address outside of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page from its parts; empty ones are left out. title: plain text."""
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(heading: str, body: str) -> str:
    """A heading and what stands under it; nothing where there is nothing. Both are HTML."""
    return f"<section>\n<h2>{heading}</h2>\n{body}\n</section>" if body else ""


def tr(cells: Sequence[str], kind: str = "") -> str:
    """A row of a table from plain texts."""
    mark = f' class="{kind}"' if kind else ""
    return f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def table(columns: Sequence[str], body: Sequence[str], texts: int = 1) -> str:
    """A table that scrolls by itself where it is wider than the screen.

    columns: plain texts; body: rows of `tr`; texts: how many columns, from the left, hold words and
    not figures.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return (
        f'<div class="scroll"><table '
        f'class="texts-{texts}"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def bullets(sentences: Sequence[str]) -> str:
    """A list of plain sentences; nothing where there are none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="plain">{items}</ul>' if sentences else ""


def warned(sentences: Sequence[str]) -> str:
    """Plain sentences that no reader should miss; nothing where there are none."""
    return f'<div class="bad">{bullets(sentences)}</div>' if sentences else ""


def definitions(entries: Mapping[str, str]) -> str:
    """Word and meaning, plain texts."""
    return (
        "<dl>"
        + "".join(
            f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in entries.items()
        )
        + "</dl>"
    )


def colour_key(variables: Mapping[str, str]) -> str:
    """Name -> variable of report.css, as dots with their names."""
    items = "".join(
        f'<li><i style="background:var({variable})"></i>{escape(name)}</li>'
        for name, variable in variables.items()
    )
    return f'<ul class="key">{items}</ul>'


def figure(heading: str, drawing: str, caption: str) -> str:
    """A drawing (HTML) with its heading and caption (plain texts); a drawing that has its title
    inside needs no heading.
    """
    title = f"<h3>{escape(heading)}</h3>" if heading else ""
    return f"<figure>{title}{drawing}<figcaption>{escape(caption)}</figcaption></figure>"
