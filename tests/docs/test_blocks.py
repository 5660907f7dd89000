# SPDX-License-Identifier: Apache-2.0
"""Each block of code is run by a test that exists, or the table says why it is not."""

from __future__ import annotations

import re

from docs.blocks import HOW, PAGES, ROOT, RUNS, SERVED, blocks, how

_TOLD = (".py", ".service", ".conf", ".yaml")


def test_each_block_is_run_or_says_why_not() -> None:
    wrong = []
    for block in blocks():
        try:
            runner = how(block)
        except KeyError as error:
            wrong.append(error.args)
            continue
        path = runner.partition(":")[0].split()[0]
        if not (
            runner in (RUNS, SERVED) or runner.startswith(("not run: ", "make ")) or (ROOT / path).exists()
        ):
            wrong.append((block.page, runner))
    assert not wrong


def test_no_row_is_for_a_block_that_is_gone() -> None:
    found = blocks()
    gone = [
        (page, beginning)
        for page, rows in HOW.items()
        for beginning in rows
        if not any(block.page == page and block.text.startswith(beginning) for block in found)
    ]
    assert not gone


def test_no_page_installs_kvlink_from_an_index() -> None:
    """Nothing is published, so that anybody could publish something else under the name."""
    install = re.compile(r"pip install [^`#&\n]*(?<![./\w])'?kvlink\b")
    lines = [
        (path.name, line)
        for path in PAGES
        for line in path.read_text().splitlines()
        if install.search(line) and not re.search(r"do not run|would install|is installed", line)
    ]
    assert not lines


def test_a_page_says_before_an_install_that_it_brings_torch() -> None:
    """Its default build has 5 GB of CUDA libraries, also where there is no GPU."""
    brings_torch = re.compile(r"^ *pip install [^\n]*\[[^]\n]*\b(?:all|demo|torch)\b", re.MULTILINE)
    pages = {path.name: path.read_text() for path in PAGES}
    silent = [
        (name, install.group())
        for name, text in pages.items()
        for install in brings_torch.finditer(text)
        if "5 GB" not in re.split("^#", text[: install.start()], flags=re.MULTILINE)[-1]
    ]
    assert not silent


def test_no_message_and_no_unit_installs_kvlink_from_an_index() -> None:
    """An extra is added to the kvlink that is installed already, so that pip takes kvlink from nowhere."""
    install = re.compile(r"pip install [^`#&\n]*(?<![./\w])'?kvlink\b(?!\[)|/pip install [^\n]*'kvlink\b")
    files = [
        path
        for room in ("kvlink", "integrations")
        for path in (ROOT / room).rglob("*")
        if path.suffix in _TOLD
    ]
    lines = [
        (path.name, line) for path in files for line in path.read_text().splitlines() if install.search(line)
    ]
    assert not lines
