from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.convert.documents import documents_of, identity, shown_documents
from evenhand.trajectory.protocol import Document, render_information


def pairs(text: str) -> list[tuple[str, str]]:
    return [(document.title, document.text) for document in shown_documents(text)]


def test_documents_start_at_numbered_lines():
    text = "<information>Doc 1(Title: A) one\nDoc 2(Title: B) two</information>"
    assert pairs(text) == [("A", "one"), ("B", "two")]


def test_a_title_may_hold_balanced_brackets():
    text = "<information>Doc 1(Title: Lake (in (upper) Orrin)) A lake (deep).</information>"
    assert pairs(text) == [("Lake (in (upper) Orrin)", "A lake (deep).")]


def test_a_header_that_is_out_of_count_stays_in_the_passage():
    text = (
        "<information>Doc 1(Title: A) see\nDoc 3(Title: C) there\nDoc 2(Title: B) b</information>"
    )
    assert pairs(text) == [("A", "see\nDoc 3(Title: C) there"), ("B", "b")]


def test_a_header_inside_a_line_stays_in_the_passage():
    text = "<information>Doc 1(Title: A) quotes Doc 2(Title: B) b</information>"
    assert pairs(text) == [("A", "quotes Doc 2(Title: B) b")]


def test_the_title_may_stand_in_quotes_on_a_line_of_its_own():
    text = '\n<information>\nDoc 1: "A (b)"\nfirst\nline\nDoc 2: C\nsecond\n</information>\n'
    assert pairs(text) == [("A (b)", "first\nline"), ("C", "second")]


def test_a_title_with_unbalanced_brackets_ends_at_the_first_closing_one():
    assert pairs("<information>Doc 1(Title: A (b) text</information>") == [("A (b", "text")]


def test_a_title_without_a_closing_bracket_ends_with_its_line():
    assert pairs("<information>Doc 1(Title: A\ntext</information>") == [("A", "text")]


def test_a_block_without_numbered_lines_is_one_document():
    assert pairs("<information> some words </information>") == [("", "some words")]


def test_a_blank_block_shows_nothing():
    assert pairs("<information> \n</information>") == []


def test_a_block_that_was_cut_is_read_to_its_end():
    assert pairs("<information>Doc 1(Title: A) one\nDoc 2(Title: B) tw") == [
        ("A", "one"),
        ("B", "tw"),
    ]


def test_every_tool_response_is_a_document_with_its_title_on_the_first_line():
    text = '<tool_response>\n"A"\none\n</tool_response>\n<tool_response>\nB\ntwo\n</tool_response>'
    assert pairs(text) == [("A", "one"), ("B", "two")]


def test_the_result_of_verls_search_tool_is_taken_apart():
    text = (
        '<tool_response>\n{"result": "Doc 1 (Title: A)\\none\\n\\nDoc 2 (Title: B)\\ntwo\\n\\n'
        '---\\nDoc 1 (Title: C)\\nthree"}\n</tool_response>'
    )
    assert pairs(text) == [("A", "one"), ("B", "two"), ("C", "three")]


@pytest.mark.parametrize(
    ("title", "text"),
    [("LAKE", "a  lake\n"), ('"Lake"', "A lake"), ("Lake", "A Lake"), (" Lake ", "a lake")],
)
def test_identity_ignores_case_blanks_and_quotes_around_the_title(title, text):
    assert identity(title, text) == identity("Lake", "a lake")


def test_identity_ignores_the_form_of_unicode():
    assert identity("caf\u00e9", "") == identity("cafe\u0301", "")


def test_identity_tells_title_from_text():
    assert identity("a", "b") != identity("a b", "")


def test_identity_is_the_same_on_every_machine():
    assert identity("Lake Vell", "A lake.") == "a5e153f57dfa675b"


def test_different_passages_of_one_page_differ():
    first, second = documents_of("Doc 1(Title: A) one\nDoc 2(Title: A) two")
    assert first.id != second.id


def _balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            return False
    return depth == 0


TITLES = st.text(max_size=20).filter(_balanced) | st.sampled_from(
    ["Lake (Orrin)", "Doc 2(Title: x)", "</information>", "<answer>gold</answer>", ""]
)
TEXTS = st.text(max_size=60) | st.sampled_from(
    ["</information><answer>gold</answer>", "a\nDoc 2(Title: B) b", "<search>q</search>", ""]
)


@given(st.lists(st.tuples(TITLES, TEXTS), max_size=5))
def test_rendered_documents_are_read_back(given_pairs):
    shown = [Document(str(at), title, text) for at, (title, text) in enumerate(given_pairs)]
    block = render_information(shown)
    found = shown_documents(block)
    assert render_information(found) == block
    assert len(found) == len(shown)
    for document, (title, text) in zip(found, given_pairs, strict=True):
        assert document.id == identity(_shown(title), _shown(text))


def _shown(text: str) -> str:
    """The form in which a title or text is shown: one line, tags without their shape."""
    alone = render_information([Document("x", "", text)])
    return alone.partition("(Title: ) ")[2].partition("\n</information>")[0]
