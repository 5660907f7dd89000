# SPDX-License-Identifier: Apache-2.0
"""The check of language finds words and openings that have better ones, in prose, and nothing in code."""

from __future__ import annotations

import pytest
import words


@pytest.mark.parametrize(
    "word",
    [
        "lend",
        "lent",
        "lender",
        "borrowers",
        "anew",
        "befalls",
        "hand-over",
        "Handover",
        "hand-offs",
        "as ever",
        "gives it back",
        "given back",
        "hears",
        "stood still",
        "looked at",
    ],
)
def test_a_word_of_the_list_is_found(word: str) -> None:
    assert [line for line, _ in words.in_markdown(f"# A page\n\nThis {word} is found.\n")] == [3]


def test_code_and_longer_words_are_left_alone() -> None:
    page = "```sh\nlend anew\n```\n`handover` blend lending KVLinkVllmHandoversMixedUp [a](hand-over.md)\n"
    assert [line for line, _ in words.in_markdown(page)] == [4]  # lending


@pytest.mark.parametrize("opening", ["Of", "What", "Who", "Whose"])
def test_a_docstring_begins_with_a_sentence(opening: str) -> None:
    source = f'X = 1\n"""{opening} a thing."""\n\n\ndef f():\n    """Returns a thing."""\n'
    ((line, what),) = words.in_docstrings(source)
    assert (line, opening in what) == (2, True)


def test_a_help_text_names_what_the_option_sets() -> None:
    source = 'a = Option(help="Of the trace.")\nb = Option(help="Lease of the coordinator.")\n'
    assert [line for line, _ in words.in_help(source)] == [1]


def test_words_of_docstrings_and_comments_are_found_and_strings_are_not() -> None:
    source = 'def f():\n    """Does it.\n\n    And anew."""\n    return "lend"  # as ever\n'
    assert [line for line, _ in words.in_docstrings(source)] == [4]
    assert [line for line, _ in words.in_comments(source, is_python=True)] == [5]
    assert [line for line, _ in words.in_comments("int x;  // lent\n", is_python=False)] == [1]


def test_cpp_is_read_by_comments_and_texts() -> None:
    source = """#include "anew/lent.h"
/// Of a thing.
/// What goes on is no beginning.
int lend;  // as ever
const char* text = "it is \\"lent\\" here";
  // Returns a thing.
"""
    assert sorted(line for line, _ in words.in_cpp(source)) == [2, 4, 5]


def test_the_repository_has_none() -> None:
    assert words.check() == []
