"""Owns the HTML of a report: escaped text, tables, pictures and a style, all of it inside the one page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

_NOTHING_FROM_OUTSIDE = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""A browser then refuses any request, whatever the page might hold."""
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1200px;padding:1rem 1.5rem 4rem;color:#1c2733;background:#fff}
h1{margin:.2em 0;font-size:1.6em;overflow-wrap:anywhere}h2{margin:2em 0 .5em;border-bottom:2px solid #dde4ea;font-size:1.25em}
.status{display:inline-block;margin:.3em 0}
.status{font-weight:600;padding:.1em .6em;border-radius:1em;background:#e3e8ec}.done{background:#d3f0d8}
.failed,.killed{background:#f8d4d2}.stopped,.running,.unseen{background:#fdeec2}
.tiles{display:flex;flex-wrap:wrap;gap:.8rem;margin:1rem 0}.tiles div{background:#f4f7f9;border-radius:8px;padding:.5rem .9rem}
.tiles b{display:block;font-size:1.2em}.tiles span,.note,footer{color:#5d6b78}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:1rem}
figure{margin:0}.chart{border:1px solid #dde4ea;border-radius:8px;padding:.6rem}figcaption{font-weight:600}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:#5d6b78}.grid{stroke:#e3e8ec}
.legend{display:flex;flex-wrap:wrap;gap:0 1em;font-size:.85em}
.legend i{display:inline-block;width:1em;height:.25em;margin:0 .3em .2em 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.92em}
td,th{padding:.25em .8em;text-align:left;vertical-align:top;
border-bottom:1px solid #e9eef2;overflow-wrap:break-word}th{border-bottom:2px solid #c9d3dc}.number{text-align:right;
font-variant-numeric:tabular-nums;white-space:nowrap}img{max-width:100%;height:auto;display:block;margin:.3rem 0 1.2rem}
pre{background:#f4f7f9;padding:1rem;overflow-x:auto;font-size:.85em}.fault{color:#a3201a}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document; `parts` are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_NOTHING_FROM_OUTSIDE)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    """The page's title."""
    return f"<h1>{escape(text)}</h1>"


def section(title: str, *parts: str) -> str:
    """A heading with what is under it; nothing where that is nothing."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{inside}</section>" if inside else ""


def paragraph(text: str, kind: str = "") -> str:
    """Text, of a style's class."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if text else ""


def tiles(pairs: Iterable[tuple[str, str | None]]) -> str:
    """Key figures; those that are not known are left out."""
    known = [f"<div><span>{escape(name)}</span><b>{escape(text)}</b></div>" for name, text in pairs if text]
    return f'<div class="tiles">{"".join(known)}</div>' if known else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int | None = None) -> str:
    """Rows of text under a header; columns from `numbers_from` on are numbers. Nothing where there is no row."""
    inside = "".join(f"<tr>{_cells('td', row, numbers_from)}</tr>" for row in rows)
    head = f"<thead><tr>{_cells('th', header, numbers_from)}</tr></thead>" if header else ""
    return f'<div class="scroll"><table>{head}<tbody>{inside}</tbody></table></div>' if inside else ""


def picture(png: bytes, caption: str) -> str:
    """A PNG inside the page."""
    data = base64.b64encode(png).decode()
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        "</figure>"
    )


def folded(title: str, text: str) -> str:
    """Text as it is, behind a line that opens it."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>" if text else ""


def _cells(tag: str, cells: Sequence[str], numbers_from: int | None) -> str:
    kinds = (' class="number"' if numbers_from is not None and at >= numbers_from else "" for at in range(len(cells)))
    return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
