"""Phrases that are not used here are found wherever they are written, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_terms

RULES = check_terms.load_rules(r"""
read: [src/*.py, tests/*.py, conf/*.yml, '*.md']
exempt: [docs/decisions.md]
allow: ['`[a-z]+(?:\.[a-z]+)+`']
stored_keys: [old_places]
terms:
  - word: position
    banned: ['\bplaces?\b']
    allow: ['\bin place of\b']
  - word: re-planning
    banned: ['\bsecond look\b']
  - word: monitor
    banned: ['\bwatch\b']
    files: [src/*]
    except_files: [src/clock.py]
""")


def found(path: str, text: str) -> list[str]:
    return [str(hit) for hit in check_terms.find_hits(path, text, RULES)]


def test_a_phrase_is_named_with_its_line_and_the_word_to_use() -> None:
    assert found("docs/page.md", "one\n\nThe Place of it.\n") == ["docs/page.md:3: Place -> position"]


@pytest.mark.parametrize(
    "line",
    ["second_look = 1", "class SecondLook:", "def makeSecondLook(): ...", "# a second look", 'KEY = "second_look"'],
)
def test_identifiers_are_taken_apart(line: str) -> None:
    (hit,) = check_terms.find_hits("src/a.py", f"x = 1\n{line}\n", RULES)
    assert (hit.line, hit.phrase.lower(), hit.word) == (2, "second look", "re-planning")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/a.py", "# then a second\n# look\n"),
        ("src/a.py", '    """Say that a second\n    look follows."""\n'),
        ("docs/a.md", "> a second\n> look\n"),
        ("conf/base/a.yml", "a: 1 # a second\n# look\n"),
    ],
)
def test_a_phrase_goes_on_in_the_next_line(path: str, text: str) -> None:
    assert found(path, text) == [f"{path}:1: second look -> re-planning"]


def test_the_end_of_a_paragraph_ends_a_phrase() -> None:
    assert found("docs/a.md", "wait a second\n\nlook at it\n") == []


def test_parts_of_words_are_no_phrases() -> None:
    assert found("src/a.py", "replaces = placement = misplaced = 1\n") == []


def test_contexts_stay_allowed() -> None:
    assert found("docs/a.md", "in place of it; `data.place.text`; `old_places`\n") == []
    assert found("src/a.py", 'summary["old_places"]\n') == []
    assert found("src/a.py", "class Summary(TypedDict):\n    old_places: int\n") == []
    assert len(found("src/a.py", "old_places = 1\n")) == 1
    assert len(found("docs/a.md", "in place of a place\n")) == 1


def test_a_term_of_some_files_is_looked_for_there_only() -> None:
    assert len(found("src/a.py", "watch = 1\n")) == 1
    assert found("src/clock.py", "watch = 1\n") == []
    assert found("docs/a.md", "watch it\n") == []


def test_of_tests_only_the_names_count() -> None:
    text = '"""A place."""\n\nclass TestPlace:\n    def test_the_place(self):\n        place = "second look"\n'
    assert found("tests/test_a.py", text) == [
        "tests/test_a.py:3: Place -> position",
        "tests/test_a.py:4: place -> position",
    ]
    assert found("tests/test_second_look.py", "") == ["tests/test_second_look.py:1: second look -> re-planning"]


def test_of_configuration_only_the_comments_count() -> None:
    text = 'place: "#place" # the place\ncolour: a#place\n'
    assert found("conf/base/a.yml", text) == ["conf/base/a.yml:1: place -> position"]


def test_released_sections_of_the_changelog_keep_their_words() -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n- a place\n\n## [0.1.0] - 2026-01-01\n\n- a place\n"
    assert found("CHANGELOG.md", text) == ["CHANGELOG.md:5: place -> position"]


def test_files_are_read_as_the_rules_say() -> None:
    assert RULES.covers("src/lm_tuning/a.py")
    assert RULES.covers("docs/how-to/a.md")
    assert not RULES.covers("docs/decisions.md")
    assert not RULES.covers("src/a.json")


def test_the_terms_of_this_project_can_be_read() -> None:
    rules = check_terms.load_rules(Path(check_terms.ROOT, check_terms.TERMS).read_text(encoding="utf-8"))
    for term in rules.terms:
        assert not term.banned.search(""), term.word
    for path in ("docs/glossary.md", "CONTRIBUTING.md", "SECURITY.md"):
        assert check_terms.find_hits(path, Path(check_terms.ROOT, path).read_text(encoding="utf-8"), rules) == []


def test_the_exit_code_says_whether_there_is_something_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "terms.yml").write_text(
        "read: ['*.md']\nexempt: []\nterms:\n  - word: fix\n    banned: ['\\bmend\\b']\n"
    )
    page = tmp_path / "page.md"
    monkeypatch.setattr(check_terms, "ROOT", tmp_path)
    page.write_text("fix it\n")
    assert check_terms.main([str(page)]) == 0
    page.write_text("mend it\n")
    assert check_terms.main([str(page)]) == 1
    assert capsys.readouterr().out.startswith("page.md:1: mend -> fix\n1 to change")
    assert check_terms.main(["--count", str(page)]) == 1
    assert capsys.readouterr().out.startswith("     1  fix\n")
