# SPDX-License-Identifier: Apache-2.0
"""Which mutants are made of a line, and that one of them at a time is switched on."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from mutation import __main__ as mutation
from mutation.cpp_mutants import rewritten as rewritten_cpp
from mutation.cpp_mutants import sites_of as cpp_sites
from mutation.mutants import interval, sample
from mutation.python_mutants import Switch, pieces_of, rewritten, sites_of, users_of

PYTHON = {
    "a < b": {"comparison": ["a <= b"]},
    "a is not b": {"comparison": ["a is b"]},
    "a and not b": {"operator": ["a or not b", "b"], "skipped condition": ["not b", "a"]},
    "a - 1": {"operator": ["a + 1"], "constant": ["2"]},
    "a if b else c": {"skipped branch": ["a", "c"]},
    "[a for a in b if a]": {"skipped branch": ["True"]},
    "f(a, b)": {"exchanged arguments": ["f(b, a)"], "removed statement": [""]},
    "await f()": {"removed await": [""]},
    "a.b += 1": {"removed statement": [""], "operator": ["a.b -= 1"], "constant": ["2"]},
    "raise f(1 < 2)": {"removed statement": [""]},
    "with a.lock:\n  f()": {"dropped lock": ["f()"], "removed statement": [""]},
    "if a:\n  f()\n else:\n  g()": {"skipped branch": ["False", "True"], "removed statement": ["", ""]},
    "a.b = f()\n c.d = 0": {
        "removed statement": ["", ""],
        "swapped statements": ["ahead of a.b = f()"],
        "constant": ["1"],
    },
    "log.info('%d', 1)": {},
    "if a < 1:\n  log.info('a')\n elif b:\n  log.info('b')": {},
    "f'{a < b}'": {},
    "a, b = 1, 2\n c.f()": {"constant": ["2", "3"], "removed statement": [""]},
    "a.b = max(a.b, c)\n d.e = len(f)": {"removed statement": ["", ""]},
    "a.b = 1\n c.d = 2": {"removed statement": ["", ""], "constant": ["2", "3"]},
}

CPP = {
    "return a < b;": {"comparison": ["(a) <= (b)"]},
    "return a->b + c[i - 1] == d;": {
        "comparison": ["(a->b + c[i - 1]) != (d)"],
        "operator": ["(a->b) - (c[i - 1])", "(i) + (1)"],
        "constant": ["1 + 1"],
    },
    "if (a && !b) f();": {
        "operator": ["(a) || (!b)", "static_cast<bool>(b)"],
        "skipped condition": ["static_cast<bool>(a)", "static_cast<bool>(!b)"],
        "skipped branch": ["false"],
        "removed statement": [""],
    },
    "if (a) { f(); } else { g(); }": {"skipped branch": ["false", "true"], "removed statement": ["", ""]},
    "std::vector<int> a; T* const b = c; auto d = e;": {},
    "std::lock_guard lock(mutex_); ++a;": {
        "dropped lock": [""],
        "removed statement": [""],
        "operator": ["-- a;"],
    },
    "a.store(b); c->store(d);": {
        "removed statement": ["", ""],
        "swapped statements": ["c->store(d); a.store(b);"],
    },
    "if (a) b.store(c); d.store(e);": {"skipped branch": ["false"], "removed statement": ["", ""]},
    "return f(a, b);": {"exchanged arguments": ["f(b, a)"]},
    "a += kMost;": {"removed statement": [""], "operator": ["a -= kMost;"], "constant": ["kMost + 1"]},
    "return Code::kMost;": {},
    "constexpr int kMost = 1 + 2;": {},
    "KVLINK_CHECK(a < b && f(a, b)); KVLINK_DCHECK(!a);": {},
    "#if X\n f();\n#else\n g();\n#endif": {"removed statement": [""]},
}


def found(sites: list) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for site in sites:
        kinds.setdefault(site.mutant.operator, []).append(site.mutant.after)
    return kinds


@pytest.mark.parametrize("line", PYTHON)
def test_python_mutants(line: str) -> None:
    assert found(sites_of(ast.parse(f"async def function():\n {line}\n"), "a.py")) == PYTHON[line]


@pytest.mark.parametrize("line", CPP)
def test_cpp_mutants(line: str) -> None:
    source = f"namespace n {{\nint A::f(int a) const {{\n  {line}\n}}\n}}\n"
    sites = cpp_sites(source, "a.cc")
    assert found(sites) == CPP[line]
    assert {site.mutant.scope for site in sites} <= {"A::f"}
    once = [rewritten_cpp(source, "a.cc", [(7, site)]) for site in sites]
    assert all("mutation::" in text and "(7" in text and text.count("{") == text.count("}") for text in once)


@pytest.mark.parametrize(
    ("source", "results"),
    [
        ("def f(a, b):\n  return a < b and a > 0", {(1, 1): {False, True}, (1, 2): {True, False}}),
        (
            "def f(a, b):\n  c = []\n  c.append(a)\n  c.append(b)\n  return c",
            {(1, 2): {(1, 2), (2, 1), (1,), (2,), "unbound"}},
        ),
        ("class C:\n  n = 3\ndef f(a, b):\n  return C.n", {(0, 0): {3, 4}}),
    ],
    ids=["expressions", "statements", "made at import"],
)
def test_one_mutant_at_a_time_is_on(source: str, results: dict) -> None:
    sites = sites_of(ast.parse(source), "a.py")
    code = rewritten(source, "a.py", {site.mutant.name: i for i, site in enumerate(sites, 1)})

    def call(number: int, arguments: tuple[int, int]) -> object:
        Switch.active = number
        names = {"mutant_on": Switch.on}
        exec(code, names)
        try:
            value = names["f"](*arguments)  # type: ignore[operator]
        except UnboundLocalError:
            return "unbound"
        return tuple(value) if isinstance(value, list) else value

    try:
        for arguments, values in results.items():
            assert call(0, arguments) in values
            assert {call(number, arguments) for number in range(len(sites) + 1)} == values
        assert Switch.reached >= {"a.py:f", *range(1, len(sites) + 1)}
    finally:
        Switch.active = 0
        Switch.reached.clear()


def test_who_uses_what_is_made_at_import() -> None:
    source = """
A = 1
B = {2: A}
def f():
  return m.B
def g(a=3):
  return C
class C:
  D: int = 4
  def h(self):
    return g()
"""
    sites = {
        site.mutant.before: site.mutant for site in sites_of(ast.parse(source), "a.py") if site.at_import
    }
    pieces = pieces_of(
        {"a.py": ast.parse(source), "b.py": ast.parse("from a import A\ndef i():\n  return A")}
    )
    found = {before: users_of(mutant, pieces) for before, mutant in sites.items()}
    assert found == {
        "1": {"a.py:f", "b.py:i"},
        "2": {"a.py:f"},
        "3": {"a.py:g", "a.py:h"},
        "4": {"a.py:g"},
    }


def test_a_run_goes_on_where_another_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "WORK", tmp_path)
    sites = sites_of(ast.parse("def f(a):\n return a + 1 < a * 2 < a - 3"), "a.py")
    names = [site.mutant.name for site in sites]
    ends = [("killed", "t"), ("survived", ""), ("timeout", "")]
    lines = [[name, *end] for name, end in zip(names, ends, strict=False)]
    (tmp_path / "results.unit").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [tried.outcomes for tried in mutation._kept("m", sites, False).values()] == [{}] * len(sites)
    kept = mutation._kept("m", sites, True)
    assert [tried.outcomes for tried in kept.values()][:4] == [{"unit": ends[0]}, {}, {"unit": ends[2]}, {}]
    mutation._keep("m", kept.values())
    (tmp_path / "results.unit").unlink()
    assert mutation._kept("m", sites, True) == kept


def test_a_sample_stays_when_mutants_are_added() -> None:
    mutants = [
        each.mutant for each in sites_of(ast.parse("def f(a):\n return a + 1 < a * 2 < a - 3"), "a.py")
    ]
    of_all = sample(mutants, len(mutants), seed=1)
    assert sample([each for each in mutants if each != of_all[1]], 2, seed=1) == [of_all[0], of_all[2]]
    assert of_all != sample(mutants, len(mutants), seed=2)
    assert [round(each) for each in interval(90, 100)] == [83, 94]
