"""Features of positions match expected values."""

import numpy as np
import pytest
from completion.data import features
from completion.data.corpus import Corpus
from completion.data.features import (
    FeatureReader,
    earlier_matches,
    recent_items,
)
from completion.data.ragged import Ragged
from completion.data.vocabulary import (
    UNKNOWN,
    ItemVocabulary,
    common_rows,
    hashed_pieces,
    pieces_of,
)


def make_corpus(documents, marks=None):
    """Returns a corpus of words. By default, the mark of every word is 0."""
    names = sorted({word for words in documents for word in words})
    items = np.array(
        [names.index(word) for words in documents for word in words], np.int32
    )
    splits = np.cumsum([0, *map(len, documents)])
    if marks is None:
        marks = np.zeros(len(items), np.int32)
    return Corpus(
        item_names=names,
        mark_names=["NAME", "."],
        place_names=["p", "q"],
        scope_names=["def f"],
        documents=[str(i) for i in range(len(documents))],
        items=items,
        document_splits=splits,
        marks=np.array(marks, np.int32),
        mark_splits=splits,
        marks_before=np.arange(len(items)),
        places=Ragged.from_lists([[0, 1]] * len(documents)),
        scopes=Ragged.from_lists([[]] * len(items)),
        facts=[],
        words={"document": "file", "item": "word"},
    )


def make_reader(documents, held_out, min_count=1):
    corpus = make_corpus(documents)
    held_out = np.array(held_out)
    train = corpus.positions_of(~held_out)
    vocabulary = ItemVocabulary(
        corpus.items[train], corpus.item_names, min_count=min_count
    )
    return FeatureReader(corpus, vocabulary, held_out), vocabulary


def test_vocabulary_is_sorted_by_frequency_in_training():
    _, vocabulary = make_reader(
        [["b", "a", "b", "c"], ["new", "c", "c", "c"]], [False, True]
    )
    assert vocabulary.names == ["", "b", "a", "c"]
    assert vocabulary.counts.tolist() == [0, 2, 1, 1]
    assert np.exp(vocabulary.log_shares()[1:]) == pytest.approx(
        [0.5, 0.25, 0.25]
    )


def test_rare_items_have_no_row():
    _, vocabulary = make_reader(
        [["b", "a", "b"], ["a"]], [False, True], min_count=2
    )
    assert vocabulary.names == ["", "b"]


def test_history_is_the_previous_items_of_the_document_last_first():
    reader, vocabulary = make_reader(
        [["a", "b"], ["c", "d", "e"]], [False, False]
    )
    batch = reader.batch(np.array([0, 2, 4]))
    names = [
        [vocabulary.names[row] for row in rows]
        for rows in batch["history"].to_lists()
    ]
    assert names == [[], [], ["d", "c"]]
    assert batch["history"].to_lists() == batch["bag"].to_lists()


def test_history_is_truncated():
    words = [str(number) for number in range(100)]
    reader, _ = make_reader([words, words], [False, True])
    batch = reader.batch(np.array([99]))
    assert len(batch["history"].values) == features.HISTORY
    assert len(batch["bag"].values) == features.BAG
    assert len(batch["recent"].values) == features.RECENT


def test_unknown_items_are_in_the_history_and_not_in_recent_items():
    reader, vocabulary = make_reader(
        [["a", "b"], ["a", "new", "b"]], [False, True]
    )
    batch = reader.batch(np.array([4]))
    rows = [UNKNOWN, vocabulary.names.index("a")]
    assert batch["history"].to_lists() == [rows]
    assert batch["recent"].to_lists() == [rows[1:]]
    assert reader.targets(np.array([3])).tolist() == [UNKNOWN]


def test_features_do_not_depend_on_the_target_or_later_items():
    before = [["a", "b", "c", "a", "b"], ["a", "b", "c"]]
    after = [["a", "b", "c", "b", "c"], ["a", "b", "c"]]
    position = np.array([3])
    batches = []
    for documents in (before, after):
        # The vocabulary is counted from the second file only, so the
        # vocabularies of both readers are equal.
        reader, _ = make_reader(documents, [True, False])
        batches.append(reader.batch(position))
    for name in batches[0]:
        assert batches[0][name].to_lists() == batches[1][name].to_lists()


def test_recent_items_are_distinct_with_the_last_used_first():
    rows = np.array([1, 2, 1, 3, 3, 5, 6])
    found = recent_items(rows, np.array([0, 5, 7]), 3)
    assert found.tolist() == [
        [0, 0, 0],
        [1, 0, 0],
        [2, 1, 0],
        [1, 2, 0],
        [3, 1, 2],
        [0, 0, 0],
        [5, 0, 0],
    ]


def test_earlier_match_has_the_same_previous_item_and_mark():
    words = [["a", "x", "a", "y", "a", "z"], ["a", "x"]]
    assert earlier_matches(make_corpus(words)).tolist() == [
        -1,
        -1,
        -1,
        1,
        -1,
        3,
        -1,
        -1,
    ]
    marks = [1, 0, 0, 0, 1, 0, 0, 0]
    assert earlier_matches(make_corpus(words, marks)).tolist() == [
        -1,
        -1,
        -1,
        -1,
        -1,
        1,
        -1,
        -1,
    ]


def test_echoes_are_the_items_after_earlier_matches_latest_first():
    reader, vocabulary = make_reader(
        [["a", "x", "a", "y", "a", "z"], ["a"]], [False, True]
    )
    echoes = reader.batch(np.array([5]))["echo"].to_lists()
    assert [vocabulary.names[row] for row in echoes[0]] == ["y", "x"]


def test_label_of_a_single_training_document_has_no_row():
    labels = Ragged.from_lists([[0, 1], [0, 2, 2], [1]])
    rows, names = common_rows(labels, np.array([0, 1, -1]), ["p", "q", "r"])
    assert rows.tolist() == [0, -1, -1]
    assert names == ["p"]


def test_words_of_a_name_do_not_depend_on_its_case_style():
    words = [
        [piece for piece in pieces_of(name) if piece[0] != "#"]
        for name in ("read_file", "readFile", "ReadFile", "READ_FILE")
    ]
    assert words == [["read", "file"]] * 4


def test_hashed_pieces_are_in_range_and_deterministic():
    pieces = hashed_pieces(["a", "größe_2", "_", ""], 7)
    assert len(pieces.splits) == 5
    assert pieces.values.min() >= 0 and pieces.values.max() < 7
    assert (
        pieces.values == hashed_pieces(["a", "größe_2", "_", ""], 7).values
    ).all()


def test_unknown_item_has_spelling_features():
    reader, _ = make_reader([["a", "b"], ["brand_new", "b"]], [False, True])
    pieces = reader.batch(np.array([3]))["pieces"].to_lists()[0]
    assert (
        pieces
        == hashed_pieces(["brand_new"], features.PIECE_BUCKETS).values.tolist()
    )
