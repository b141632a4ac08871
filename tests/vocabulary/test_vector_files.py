"""Rows of files of word vectors are imported."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.vocabulary.test_key_rows import make
from tf_layoutmap.vocabulary import foreign_rows, key_rows

KEYS = ["fox", "h\u00fchner", "2", ". . .", "fox"]
ROWS = np.float32([[1, 2, 3], [4, -5e-3, 6], [0, 0, 1], [7, 8, 9], [3, 3, 3]])
# In a binary file, keys cannot contain blanks.
BINARY_KEYS = [key.replace(" ", "_") for key in KEYS]


def expected_of(format):
    """Returns the rows by key. The last row of a key is imported."""
    keys = KEYS if format == "text" else BINARY_KEYS
    return dict(zip(keys, ROWS.tolist()))


def text_of(keys=KEYS, separator=" ", end="\n", head=""):
    return head + "".join(
        separator.join([key, *map(repr, row.tolist())]) + end
        for key, row in zip(keys, ROWS)
    )


def binary_of(end=b"\n"):
    return b"%d 3\n" % len(KEYS) + b"".join(
        key.encode() + b" " + row.tobytes() + end
        for key, row in zip(BINARY_KEYS, ROWS)
    )


def imported(path, format, dim=3):
    return {
        key.decode(): row.tolist()
        for block in foreign_rows.READERS[format](str(path), None, dim)
        for key, row in zip(block.keys, block.rows)
    }


@pytest.mark.parametrize("block_size", [1, 2, 100])
@pytest.mark.parametrize(
    ("format", "content"),
    [
        ("text", text_of().encode()),
        ("text", text_of(head="5 3\n").encode()),
        ("text", text_of(end=" \n").encode()),
        ("text", text_of(end="\r\n").encode()),
        ("text", text_of().rstrip().encode() + b"\n\n"),
        ("text", text_of(separator="\t").encode()),
        ("word2vec", binary_of()),
        ("word2vec", binary_of(b"")),
    ],
    ids=[
        "GloVe",
        "fastText",
        "blanks",
        "lines of Windows",
        "empty line",
        "tabs",
        "word2vec",
        "gensim",
    ],
)
def test_all_rows_are_read(tmp_path, monkeypatch, block_size, format, content):
    monkeypatch.setattr(key_rows, "BLOCK_SIZE", block_size)
    path = tmp_path / "vectors"
    path.write_bytes(content)
    assert imported(path, format) == expected_of(format)


def test_the_first_line_of_a_file_with_one_column_is_a_row(tmp_path):
    path = tmp_path / "vectors"
    path.write_bytes(b"7 1\n8 2\n")
    assert imported(path, "text", dim=1) == {"7": [1.0], "8": [2.0]}


@pytest.mark.parametrize("format", ["text", "word2vec"])
def test_rows_are_written_to_a_vocabulary(tmp_path, format):
    path = tmp_path / "vectors"
    path.write_bytes(text_of().encode() if format == "text" else binary_of())
    one, _ = make()
    vocabulary = one.vocabularies["words"]
    assert (
        tlm.vocabulary.import_rows(path, vocabulary, format=format).num_new == 4
    )
    (table,) = one.embedding_tables.values()
    expected = expected_of(format)
    rows = tf.gather(table, vocabulary.lookup(list(expected)))
    np.testing.assert_array_equal(rows, list(expected.values()))


@pytest.mark.parametrize(
    ("format", "content", "words"),
    [
        ("text", b"fox 1 2 3\nhen 1 2\n", "line 2, 'hen 1 2'"),
        ("text", b"fox 1 2 3\n1 2 3\n", "line 2, '1 2 3'"),
        ("text", b"fox 1 2 x\n", "a key and 3 numbers"),
        ("text", b"1 4\nfox 1 2 3 4\n", "must have 3 columns.*Received: 4"),
        ("word2vec", b"fox 1 2 3\n", "numbers of keys and columns"),
        ("word2vec", binary_of()[:-4], "It ends before"),
        ("word2vec", b"1 2\n", "must have 3 columns"),
        ("word2vec", b"9 3\n" + b"x" * 20_000, "less than 10000 bytes"),
    ],
)
def test_other_content_raises(tmp_path, format, content, words):
    path = tmp_path / "vectors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        imported(path, format)


def test_a_missing_file_and_a_name_raise(tmp_path):
    one, _ = make()
    vocabulary = one.vocabularies["words"]
    with pytest.raises(ValueError, match="Argument `path` must be a file"):
        tlm.vocabulary.import_rows(tmp_path / "none", vocabulary, format="text")
    with pytest.raises(ValueError, match="`name` must be None"):
        tlm.vocabulary.import_rows(
            tmp_path, vocabulary, format="word2vec", name="a"
        )
