"""Windows: deterministic, disjoint, spread over the text, honest about what was found."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniw4.errors import DatasetError
from omniw4.verify.windows import make_windows, spread


class Letters:
    """A tokenizer with one token a character, numbered from 10."""

    def __call__(self, text, add_special_tokens, verbose):
        assert not add_special_tokens
        return {"input_ids": [10 + ord(c) for c in text]}


@given(st.integers(1, 300), st.integers(1, 20), st.data())
def test_spread_is_disjoint_and_reaches_both_ends(length, count, data):
    total = length * count + data.draw(st.integers(0, 1000))
    starts = spread(total, length, count)
    assert len(starts) == count
    assert starts[0] == 0
    assert all(b - a >= length for a, b in itertools.pairwise(starts))
    assert starts[-1] + length == total or count == 1


def test_windows_are_runs_of_the_text():
    found = make_windows(["abc", "defgh"], Letters(), 2, 4, None)
    assert found.ids.tolist() == [[10 + ord(c) for c in "abc\n"], [10 + ord(c) for c in "efgh"]]
    assert found.record["starts"] == [0, 6]
    assert not found.warnings


def test_bos_stands_first_and_counts_in_the_length():
    found = make_windows(["abcdefgh"], Letters(), 2, 5, 1)
    assert found.ids.shape == (2, 5)
    assert found.ids[:, 0].tolist() == [1, 1]
    assert found.ids[:, 1:].tolist() == [[10 + ord(c) for c in "abcd"], [10 + ord(c) for c in "efgh"]]


def test_the_same_text_gives_the_same_windows():
    a, b = (make_windows(["some text " * 50], Letters(), 3, 40, 1) for _ in range(2))
    assert torch.equal(a.ids, b.ids)
    assert a.record == b.record
    other = make_windows(["other text " * 50], Letters(), 3, 40, 1)
    assert a.record["ids_sha256"] != other.record["ids_sha256"]


def test_a_short_text_says_how_many_windows_it_fills():
    found = make_windows(["x" * 100], Letters(), 5, 32, None)
    assert found.ids.shape == (3, 32)
    assert found.record["asked"] == 5
    assert "3 of the 5 windows" in found.warnings[0]


@pytest.mark.parametrize("documents", [[], [""], ["x" * 31]])
def test_a_text_that_fills_no_window_is_refused(documents):
    with pytest.raises(DatasetError, match=r"holds \d+ tokens, wanted at least 32"):
        make_windows(documents, Letters(), 5, 32, None)
