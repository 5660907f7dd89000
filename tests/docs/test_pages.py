# SPDX-License-Identifier: Apache-2.0
"""Every link in a Markdown file resolves, and the site's table of contents has every page once."""

from __future__ import annotations

import re
import runpy
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import jinja2
import pytest

import kvlink
from kvlink import errors

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FILES = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted((ROOT / ".github").rglob("*.md"))]

_FENCE = re.compile(r"^(```|:::).*?^\1`*:*\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor that GitHub and MyST give to a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
    kept = [c for c in plain if c in " -_" or unicodedata.category(c)[0] in "LN"]
    return "".join(kept).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """All anchors of a page; a heading that comes twice has a number behind it."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} (.*)$", _FENCE.sub("", path.read_text()), re.MULTILINE):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def broken(path: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for groups in _LINK.findall(_FENCE.sub("", path.read_text())):
        link = next(filter(None, groups))
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    assert broken(path) == []


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One `two` three\n\n```\n# none\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#one-two-three) [c](there.md#none) [d](gone.md) [e](https://kvlink.invalid)"
    )
    assert broken(page) == ["there.md#none", "gone.md"]


def test_every_page_is_in_the_table_of_contents_once() -> None:
    listed = Counter(
        str(found.relative_to(DOCS).with_suffix(""))
        for page in PAGES
        for tree in _TOCTREE.findall(page.read_text())
        for line in tree.splitlines()
        if line.strip() and not line.startswith(":")
        for found in page.parent.glob(line.strip() + ".md")
    )
    there = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES} - {"index", "404"}
    assert listed == Counter(there)


def test_each_public_name_is_in_the_reference() -> None:
    """Users find an example there of each that they call or build themselves."""
    page = (DOCS / "reference" / "python-api.md").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: kvlink\.(\w+)$", page, re.MULTILINE))
    shown = "".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    names = set(kvlink.__all__) - {each.__name__ for each in public_errors()} - {"StaleReason", "__version__"}
    assert listed == names
    returned = {"KVLayout", "PathTaken", "PreparedPull", "PrefixChoice", "Pull", "PullStats", "Relay"}
    returned |= {"SharedPrefix", "Termination", "errors"}
    assert {name for name in names if not re.search(rf"\bkvlink\.{name}\b", shown)} == returned


def public_errors() -> list[type[errors.KVLinkError]]:
    return [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.KVLinkError)
    ]


def test_each_error_has_a_section() -> None:
    public = [each.__name__ for each in public_errors()]
    found = re.findall(r"^## (\w+)$", (DOCS / "reference" / "errors.md").read_text(), re.MULTILINE)
    assert sorted(public) == sorted(found)


def test_the_page_that_is_missing_has_the_address_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setenv("KVLINK_DOCS_ADDRESS", "https://docs.example/kvlink/")
    place = runpy.run_path(str(DOCS / "conf.py"))["place_404"]
    for page, expected in (("404", '<base href="https://docs.example/kvlink/"><meta>'), ("index", "<meta>")):
        context = {"metatags": "<meta>"}
        place(None, page, "page.html", context, None)
        assert context["metatags"] == expected


def test_each_page_leads_to_the_other_releases_and_to_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setenv("KVLINK_DOCS_VERSIONS", "0.2=https://docs.example/0.2/ 0.1=https://docs.example/0.1/")
    monkeypatch.setenv("KVLINK_DOCS_REPOSITORY", "https://code.example/kvlink")
    conf = runpy.run_path(str(DOCS / "conf.py"))
    (folder,) = conf["templates_path"]
    menu = (DOCS / folder / "sidebar/variant-selector.html").read_text()  # furo includes it in each page
    shown = jinja2.Template(menu).render(conf["html_context"])
    assert re.findall(r'href="([^"]*)">([^<]*)<', shown) == [
        ("https://docs.example/0.2/", "0.2"),
        ("https://docs.example/0.1/", "0.1"),
        ("https://code.example/kvlink/issues", "Ask or report"),
    ]
    monkeypatch.setenv("KVLINK_DOCS_SUPPORT", "mailto:help@code.example")
    again = runpy.run_path(str(DOCS / "conf.py"))["html_context"]
    assert again["docs_support"] == [("Ask or report", "mailto:help@code.example")]


def test_a_traceback_ends_with_the_section_of_its_error(tmp_path: Path) -> None:
    class Own(errors.StaleBlocks):
        """Another package defines it."""

    for error in (*(each("why") for each in public_errors()), Own("why")):
        assert str(error) == "why"
        (note,) = error.__notes__
        (tmp_path / "page.md").write_text(f"[it]({ROOT}/{note.rpartition(' ')[2]})")
        assert broken(tmp_path / "page.md") == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_begins_with_a_sentence(path: Path) -> None:
    """Before any command, table, list or section, it says what it is for."""
    title, opening = path.read_text().removeprefix("---\norphan: true\n---\n\n").split("\n\n")[:2]
    assert title.startswith("# ")
    assert re.match(r"(\[|`|\*\*)?[A-Za-z]", opening), opening


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_the_repository_that_a_page_names_exist(path: Path) -> None:
    named = re.findall(r"`((?:csrc|docs|integrations|protos|tests)/[\w./-]*[\w/])`", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_say_that_there_is_no_public_home_as_long_as_there_is_none() -> None:
    has_home = "\n[project.urls]" in (ROOT / "pyproject.toml").read_text()
    for page in ("SECURITY.md", "docs/support.md"):
        assert ("has no public home yet" in (ROOT / page).read_text()) != has_home, page
