# SPDX-License-Identifier: Apache-2.0
"""Defines the look of the report: one style sheet for screens of any width, light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

OURS = ("#0b62d6", "#00806e", "#7a3db8")
OTHERS = ("#b4532a", "#c2255c", "#9a6a00", "#8c6d46", "#a3549c", "#7a1f1f", "#6f6a00", "#c75a3c")
LIMIT = "#6b7280"
_DARK_OURS = ("#6cb0ff", "#38c9b4", "#c49bff")
_DARK_OTHERS = ("#ef9464", "#ff85ac", "#e3b54d", "#cbab82", "#dd9bd6", "#ef8b8b", "#c9c25a", "#ffa98f")
_DARK_LIMIT = "#9aa4af"
INK, PAPER, LINE = "#000000", "#ffffff", "#b0b0b0"
"""The colours that the charts' library uses for text, background and grid."""


def variables() -> dict[str, str]:
    """Returns the CSS variable that stands for each colour of a chart."""
    found = {INK: "--ink", PAPER: "--ground", LINE: "--line", LIMIT: "--limit"}
    found |= {colour: f"--ours-{number}" for number, colour in enumerate(OURS)}
    return found | {colour: f"--other-{number}" for number, colour in enumerate(OTHERS)}


def _colours(ours: Iterable[str], others: Iterable[str], limit: str) -> str:
    series = [f"--ours-{number}: {colour};" for number, colour in enumerate(ours)]
    series += [f"--other-{number}: {colour};" for number, colour in enumerate(others)]
    return " ".join([*series, f"--limit: {limit};"])


_SHEET = f"""
:root {{ color-scheme: light dark; --ground: #ffffff; --raised: #f4f6f8; --line: #d5dbe1; --ink: #1b1f24;
  --soft: #57606a; --link: #0b5cc4; --good: #1a7f37; --bad: #b3261e; --fair: #8a5300;
  {_colours(OURS, OTHERS, LIMIT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ground: #0f1317; --raised: #181d23; --line: #333c45; --ink: #e6ebf0;
  --soft: #a0abb6; --link: #7db8ff; --good: #5fd08b; --bad: #ff8a80; --fair: #f0b352;
  {_colours(_DARK_OURS, _DARK_OTHERS, _DARK_LIMIT)} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
  background: var(--ground); max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }}
h2 {{ font-size: 1.3rem; margin: 2.6rem 0 .4rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }}
h3 {{ font-size: 1.05rem; font-weight: 600; margin: 1.8rem 0 .5rem; }}
p {{ margin: .4rem 0; }} a {{ color: var(--link); }}
.soft, caption, figcaption {{ color: var(--soft); font-size: .875rem; }}
caption {{ text-align: left; padding-bottom: .3rem; }}
nav ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: 1rem 0 0; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
.scroll {{ overflow-x: auto; margin: .6rem 0; font-size: .875rem; }}
.scroll th, .scroll td {{ padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }}
.scroll th:first-child, .scroll td:first-child {{ text-align: left; }}
.scroll th {{ font-weight: 600; }} .scroll td.long {{ white-space: normal; text-align: left; overflow-wrap: anywhere;
  min-width: 14rem; }}
.bars {{ width: 100%; table-layout: fixed; }}
.bars th {{ width: 24%; text-align: right; font-weight: 400; padding: .15rem .7rem .15rem 0; line-height: 1.25; }}
.bars td {{ padding: .15rem 0; }} .bars td:last-child {{ width: 17%; padding-left: .7rem; line-height: 1.25; }}
.bars small {{ color: var(--soft); }} .bars .ours th, .bars .ours td {{ font-weight: 600; }}
.bars .ours small {{ font-weight: 400; }}
.track {{ position: relative; }}
.bar {{ display: block; height: 1.15rem; min-width: 2px; border-radius: 2px; background: var(--other-0); }}
.ours .bar {{ background: var(--ours-0); }} .limit .bar {{ background: var(--limit); }}
.mark {{ position: absolute; top: 0; bottom: 0; width: 2px; margin-left: -1px; background: var(--ink); }}
.unseen {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }}
figure {{ margin: .6rem 0; overflow-x: auto; }} figure svg {{ width: 100%; min-width: 30rem; height: auto; }}
figure svg text {{ fill: var(--ink); }}
details {{ margin: .6rem 0; }} summary {{ cursor: pointer; color: var(--link); padding: .15rem 0; }}
:focus-visible {{ outline: 2px solid var(--link); outline-offset: 2px; }}
.yes {{ color: var(--good); }} .no {{ color: var(--bad); font-weight: 600; }} .at-limit {{ color: var(--soft); }}
@media (max-width: 34rem) {{ body {{ padding-top: 1.2rem; }} .bars th {{ width: 32%; }} .bars {{ font-size: .9rem; }}
  .bars td:last-child {{ width: 30%; }} }}
@media print {{ details > * {{ display: block; }} nav {{ display: none; }} }}
"""


def document(title: str, body: Iterable[str]) -> str:
    """Returns the whole page."""
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_SHEET}</style></head><body>\n"
    )
    return "\n".join([head, *body, "</body></html>\n"])
