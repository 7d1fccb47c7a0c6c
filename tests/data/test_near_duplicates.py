"""What is almost the same is found, what is not is left alone, and neither order nor cut of the work decides."""

from __future__ import annotations

import argparse
import collections
import difflib
import inspect
import json
import logging
import pathlib
import random
import statistics
import tarfile

import numpy as np
import pytest

from lm_tuning.data.split.near_duplicates import (
    choose_bands,
    comparable_texts,
    find_near_duplicates,
    hash_shingles,
    sign_texts,
)
from lm_tuning.data.store import ExampleTable, ExampleWriter

BRIDGE = "The committee will meet again on Thursday to decide whether the bridge can be repaired before winter sets in."
BAKERY = "Nobody had expected the small bakery on the corner to outlive every other shop in the long and windy street."
KOREAN = "어제 저녁에 친구들과 함께 한강 공원을 산책하면서 오래전에 다녔던 학교 이야기를 밤늦게까지 나누었습니다."
CHINESE = "昨天晚上我和朋友们一起在河边散步一直聊到很晚才回家大家都说下个月还要再来这里看月亮吃点心。"


def find(tmp_path, texts, *, similarity=0.8, indices=None, on_progress=lambda *call: None):
    path = tmp_path / "rows.arrow"
    with ExampleWriter(path, "text") as writer:
        for number, text in enumerate(texts, 1):
            writer.append(number, (text,))
    order = np.arange(len(texts)) if indices is None else np.array(indices, dtype=np.int64)
    return find_near_duplicates(
        ExampleTable(path), order, tmp_path / "scratch", similarity=similarity, on_progress=on_progress
    )


def shingles(text):
    data = comparable_texts({"text": [text]}, "text")[0]
    return {data[index : index + 6] for index in range(max(len(data) - 5, 1))}


def jaccard(one, other):
    return len(shingles(one) & shingles(other)) / len(shingles(one) | shingles(other))


def test_edited_sentences_join_and_others_do_not(tmp_path):
    texts = [
        BRIDGE,
        BAKERY,
        BRIDGE.replace("Thursday", "Friday"),
        "  " + BRIDGE.upper().replace(" ", "\n "),
        KOREAN,
        BAKERY.replace("had expected", "had really expected"),
        CHINESE,
        KOREAN.replace("어제", "그제"),
        "The committee will meet somewhere else in spring, and nobody knows yet who is going to pay for it.",
        CHINESE.replace("昨天", "前天"),
        KOREAN.replace("친구들과 함께 한강 공원을", "동생과 둘이서 시장을"),
    ]
    assert find(tmp_path, texts).units.tolist() == [0, 1, 0, 0, 2, 1, 3, 2, 4, 3, 5]


def test_short_texts_and_texts_without_blanks_are_told_apart(tmp_path):
    texts = [
        "yes",
        "no",
        "turn it on",
        "turn it up",
        "네",
        "아니요",
        "安静",
        "开灯",
        "a",
        "ab",
        "Yes ",
        "日本語",
        "日本酒",
    ]
    assert find(tmp_path, texts).units.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 10, 11]


def test_the_whole_text_of_a_row_is_compared():
    columns = {"prompt": ["  Add\tÜBER  "], "response": ["Two\nlines"], "system": [None]}
    assert comparable_texts(columns, "prompt_response") == ["add über two lines".encode()]
    columns["system"] = ["Be KIND"]
    assert comparable_texts(columns, "prompt_response") == ["add über two lines be kind".encode()]
    assert comparable_texts({"text": ["Straße"], "label": ["x"]}, "text_label") == [b"strasse"]
    calls = [{"function": {"name": "look", "arguments": {"at": "Sea"}}}]
    turns = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "Here"},
    ]
    assert comparable_texts({"messages": [json.dumps(turns)], "tools": [None]}, "messages") == [
        b'where? [{"function": {"name": "look", "arguments": {"at": "sea"}}}] here'
    ]
    assert len(comparable_texts({"text": ["x" * 3_000_000]}, "text")[0]) == 2**20


def test_sequences_are_six_bytes_and_a_shorter_text_is_one():
    hashes, offsets = hash_shingles([b"abcdefg", b"abc", b"", b"xabcdef"])
    assert offsets.tolist() == [0, 2, 3, 4, 6]
    assert hashes[0] == hashes[5]
    assert len(set(hashes.tolist())) == 5


def test_signatures_are_those_of_the_set_whatever_else_is_signed_with_it():
    texts = comparable_texts({"text": [BRIDGE, KOREAN, "ab", BAKERY * 50]}, "text")
    signed = sign_texts(texts)
    assert signed.shape == (4, 128)
    assert signed.dtype == np.uint16
    for index, text in enumerate(texts):
        assert (sign_texts([text])[0] == signed[index]).all()
    repeated = comparable_texts({"text": [BRIDGE + " " + BRIDGE]}, "text")[0]
    assert (sign_texts([repeated])[0] == signed[0]).mean() > 0.9
    # Written down: signatures that depend on the machine or on a library's version would part from it.
    assert sign_texts([b"abcdefg"])[0, :6].tolist() == EXPECTED_SLOTS


EXPECTED_SLOTS = [12054, 46782, 3721, 41652, 8390, 21038]


@pytest.mark.parametrize(
    ("similarity", "expected"), [(1.0, (1, 128)), (0.95, (9, 14)), (0.8, (21, 6)), (0.5, (42, 3)), (0.05, (128, 1))]
)
def test_bands_are_as_long_as_recall_allows(similarity, expected):
    assert choose_bands(similarity) == expected


def real_sentences():
    """Paragraphs that people wrote, from the documentation of the standard library."""
    modules = (argparse, collections, difflib, inspect, logging, pathlib, random, statistics, tarfile)
    found = []
    for module in modules:
        for _, value in sorted(vars(module).items()):
            for _, inner in [("", value), *sorted(getattr(value, "__dict__", {}).items())]:
                text = inner.__doc__ if callable(inner) else None
                if isinstance(text, str) and 150 < len(text) < 900 and text not in found:
                    found.append(text)
    return found[:100]


def edited(text, num_edits, source):
    words = text.split()
    for _ in range(num_edits):
        index = source.randrange(len(words))
        words[index : index + 1] = source.choice([[], ["entirely"], [words[index], "also"]])
    return " ".join(words)


def test_recall_and_precision_against_all_pairs(tmp_path):
    source = random.Random(3)
    originals = real_sentences()
    assert len(originals) == 100
    texts = [*originals, *(edited(text, edits, source) for text in originals for edits in (1, 3, 6))]
    vocabulary = {shingle: index for index, shingle in enumerate(set().union(*map(shingles, texts)))}
    table = np.zeros((len(texts), len(vocabulary)), dtype=np.float32)
    for row, text in enumerate(texts):
        table[row, [vocabulary[shingle] for shingle in shingles(text)]] = 1
    shared = table @ table.T
    sizes = table.sum(axis=1)
    exact = shared / (sizes[:, None] + sizes[None, :] - shared)
    units = find(tmp_path, texts).units
    joined = units[:, None] == units[None, :]
    np.fill_diagonal(exact, 0)
    # Four standard deviations of the estimate away from the threshold, nothing may be missed or made up.
    assert (exact >= 0.9).sum() > 100
    assert joined[exact >= 0.9].all()
    assert joined[exact >= 0.8].mean() > 0.9
    # Rows belong together through others too, so what must be alike is each row and one of its unit.
    nearest = np.where(joined, exact, 0).max(axis=1)
    in_units = np.bincount(units)[units] > 1
    assert (nearest[in_units] > 0.7).all()
    assert (nearest[in_units] >= 0.78).mean() > 0.95


def test_the_share_of_equal_positions_estimates_the_similarity():
    source = random.Random(4)
    pairs = [(text, edited(text, edits, source)) for text in real_sentences() for edits in (1, 4, 9)]
    one, other = (sign_texts(comparable_texts({"text": list(side)}, "text")) for side in zip(*pairs, strict=True))
    errors = (one == other).mean(axis=1) - np.array([jaccard(*pair) for pair in pairs])
    assert abs(errors.mean()) < 0.01
    assert errors.std() < 0.035
    assert np.abs(errors).max() < 0.13


def test_only_what_is_asked_for_is_compared_and_the_order_names_the_first(tmp_path):
    texts = ["nothing like it", BAKERY, BRIDGE + "!", BRIDGE + "?", BAKERY + "!", BRIDGE]
    assert find(tmp_path, texts, indices=[5, 1, 2]).units.tolist() == [0, 1, 0]
    assert find(tmp_path, texts, indices=[4, 3, 1, 0]).units.tolist() == [0, 1, 0, 2]
    assert find(tmp_path, [], indices=[]).units.tolist() == []


def test_the_order_of_rows_only_renumbers_the_units(tmp_path):
    source = random.Random(5)
    texts = [edited(text, 2, source) for text in [BRIDGE, BAKERY, KOREAN, f"{BAKERY} {KOREAN}"] * 10]
    indices = list(range(len(texts)))
    first = find(tmp_path, texts).units
    for _ in range(3):
        source.shuffle(indices)
        other = find(tmp_path, texts, indices=indices).units
        assert ((first[indices][:, None] == first[indices][None, :]) == (other[:, None] == other[None, :])).all()


def test_similarity_of_one_joins_only_what_differs_in_case_and_blanks(tmp_path):
    texts = [BRIDGE, BRIDGE + ".", BRIDGE.lower(), BRIDGE.replace(" ", "  "), BAKERY]
    assert find(tmp_path, texts, similarity=1.0).units.tolist() == [0, 1, 0, 0, 2]


def test_rows_that_share_a_long_beginning_are_compared_in_full(tmp_path):
    source = random.Random(1)
    words = [f"w{source.randrange(10**6):06}" for _ in range(4000)]
    common = " ".join(words[:20])
    texts = [f"{common} {' '.join(source.choices(words, k=12))}" for _ in range(600)]
    texts += [text + "!" for text in texts[:60]]
    units = find(tmp_path, texts).units
    assert units[600:].tolist() == list(range(60))
    assert len(set(units.tolist())) == 600


def test_a_chain_of_small_changes_is_cut_and_the_cut_is_told(tmp_path):
    source = random.Random(2)
    words = [f"{source.randrange(10**5):05}" for _ in range(60)]
    texts = []
    for step in range(1000):
        words[step % 60] = f"{source.randrange(10**5):05}"
        texts.append(" ".join(words))
    found = find(tmp_path, texts)
    assert np.bincount(found.units).max() <= 100
    assert 10 <= found.units.max() + 1 <= 30
    assert len(found.cut_links) >= found.units.max()
    for one, other in found.cut_links.tolist():
        assert found.units[one] != found.units[other]
        assert jaccard(texts[one], texts[other]) > 0.7


def test_many_rows_that_are_really_alike_are_no_chain(tmp_path):
    texts = [f"{BRIDGE} {BAKERY} {number}" for number in range(400)]
    found = find(tmp_path, texts)
    assert set(found.units.tolist()) == {0}
    assert len(found.cut_links) == 0


def test_progress_is_told_and_nothing_is_left_behind(tmp_path):
    calls = []
    find(tmp_path, [BRIDGE, BAKERY, KOREAN], on_progress=lambda *call: calls.append(call))
    assert calls[:2] == [("Signing rows", 0, 3, "rows"), ("Signing rows", 3, 3, "rows")]
    assert (calls[2], calls[-1]) == (("Comparing rows", 0, 21, "bands"), ("Comparing rows", 21, 21, "bands"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.arrow"]
