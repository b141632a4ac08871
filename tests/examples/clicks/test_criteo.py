"""Tests the reader and the generator of files in the Criteo format."""

import numpy as np
import pytest
import tensorflow as tf
from clicks import criteo, generating
from completion.data.corpus import DataError

NUMBERS = ["1", "", "-2", "0", "1000000", *[""] * 8]
CATEGORIES = ["68fd1e64", "", "80e26c9b", *["a8cd5504"] * 23]
LINE = "\t".join(["1", *NUMBERS, *CATEGORIES])
ROWS = [5] * 26


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_line_is_parsed_into_label_numbers_and_categories():
    features, labels = criteo.read_lines(tf.constant([LINE]), ROWS)
    assert labels.numpy().tolist() == [[1.0]]
    np.testing.assert_allclose(
        features["numbers"].numpy()[0, :5],
        [np.log(2), 0, 0, 0, np.log(1e6 + 1)],
        rtol=1e-6,
    )
    assert features["numbers"].shape == (1, 13)
    rows = [int(features[name][0]) for name in criteo.CATEGORIES]
    assert rows[1] == 0
    assert all(1 <= row < 5 for place, row in enumerate(rows) if place != 1)
    assert len(set(rows[3:])) == 1


def test_line_without_a_label_has_the_same_features():
    features, _ = criteo.read_lines(tf.constant([LINE, LINE]), ROWS)
    unlabeled = criteo.read_features(
        tf.constant([LINE.partition("\t")[2]] * 2), ROWS
    )
    assert unlabeled.keys() == features.keys()
    for name in unlabeled:
        np.testing.assert_array_equal(unlabeled[name], features[name])


def test_look_through_returns_statistics_of_the_file(tmp_path):
    other = "\t".join(["0", *["7"] * 13, *["05db9164"] * 26])
    path = write(tmp_path / "a.txt", [LINE] * 15 + [other])
    clicks = criteo.look_through(path, 100)
    assert (clicks.num_training, clicks.num_held_out) == (14, 2)
    assert clicks.num_clicks == 15
    assert clicks.num_blanks == 15 * 10
    # The line with other values is held out.
    assert clicks.num_distinct == (1,) * 26
    assert clicks.table_rows(max_rows=100) == [3] * 26
    assert (
        criteo.look_through(
            write(tmp_path / "b.txt", [LINE] * 99), 40
        ).num_lines
        == 40
    )


@pytest.mark.parametrize(
    "line, words",
    [
        (LINE + "\tmore", "label '1' and 40 features"),
        (LINE.partition("\t")[2], "and 38 features"),
        ("2" + LINE[1:], "label '2'"),
        (LINE.replace("1000000", "1e6"), "64 bits or blank. Received: '1e6'"),
        (LINE.replace("1000000", str(2**63)), "blank. Received: '92233720"),
        ("", "label '' and 0 features"),
    ],
)
def test_line_of_another_format_raises(line, words, tmp_path):
    path = write(tmp_path / "a.txt", [LINE] * 20 + [line])
    with pytest.raises(DataError, match=words) as raised:
        criteo.look_through(path, 100)
    assert "line 21)" in str(raised.value)


def test_missing_or_short_file_raises(tmp_path):
    with pytest.raises(DataError, match="must be a readable file"):
        criteo.look_through(tmp_path / "missing.txt", 100)
    with pytest.raises(DataError, match="at least 16 lines"):
        criteo.look_through(write(tmp_path / "a.txt", [LINE]), 100)


def numbered(tmp_path, count=40):
    lines = [
        "\t".join(["0", str(i), *[""] * 12, *["05db9164"] * 26])
        for i in range(count)
    ]
    return criteo.look_through(write(tmp_path / "n.txt", lines), count)


def which(batches):
    return [
        np.rint(np.expm1(features["numbers"][:, 0])).astype(int).tolist()
        for features, _ in batches.as_numpy_iterator()
    ]


def test_epoch_contains_each_training_line_at_most_once(tmp_path):
    clicks = numbered(tmp_path)
    options = dict(epochs=2, seed=3)
    both = which(
        criteo.training_batches(clicks, ROWS, 10, first_epoch=0, **options)
    )
    assert len(both) == 6
    for epoch in (both[:3], both[3:]):
        seen = [line for batch in epoch for line in batch]
        assert len(set(seen)) == 30 and set(seen) <= set(range(35))
    assert both[:3] != both[3:]
    # A resumed run sees the same batches.
    assert (
        which(
            criteo.training_batches(clicks, ROWS, 10, first_epoch=1, **options)
        )
        == both[3:]
    )


def test_each_worker_parses_its_own_batches(tmp_path):
    clicks = numbered(tmp_path)
    options = dict(first_epoch=0, epochs=2, seed=3)
    training = criteo.training_batches(clicks, ROWS, 10, **options)
    held_out = criteo.held_out_batches(clicks, ROWS, 2)
    for worker in range(2):
        assert (
            which(
                criteo.training_batches(
                    clicks, ROWS, 10, num_workers=2, worker=worker, **options
                )
            )
            == which(training)[worker::2]
        )
        assert (
            which(criteo.held_out_batches(clicks, ROWS, 2, 2, worker))
            == which(held_out)[worker::2]
        )


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_batches_can_be_read_with_any_seed_of_tensorflow(tmp_path, seed):
    tf.random.set_seed(seed)
    batches = criteo.training_batches(
        numbered(tmp_path), ROWS, 10, first_epoch=1, epochs=3, seed=0
    )
    assert len(batches) == len(which(batches)) == 6


def test_a_finished_training_has_no_batches(tmp_path):
    batches = criteo.training_batches(
        numbered(tmp_path), ROWS, 10, first_epoch=2, epochs=2, seed=0
    )
    assert which(batches) == []


def test_last_lines_are_held_out_in_file_order(tmp_path):
    assert which(criteo.held_out_batches(numbered(tmp_path), ROWS, 3)) == [
        [35, 36, 37],
        [38, 39],
    ]


def test_generated_file_has_the_format_and_skewed_values(tmp_path):
    path = tmp_path / "made.txt"
    generating.generate(path, 4000, seed=1)
    clicks = criteo.look_through(path, 4000)
    assert clicks.num_lines == 4000
    assert 0.05 < clicks.num_blanks / (4000 * 39) < 0.2
    columns = list(
        zip(*(line.split("\t") for line in path.read_text().splitlines()))
    )
    values, counts = np.unique(columns[39], return_counts=True)
    assert counts.max() > 40 * np.median(counts)
    assert all(len(value) in (0, 8) for value in values)
    probabilities = generating.true_probabilities(path)
    labels = np.array(columns[0], int)
    # The bound is three standard deviations of a mean of 4000 draws.
    assert abs(labels.mean() - probabilities.mean()) < 3 * 0.5 / 4000**0.5


def test_equal_arguments_generate_equal_files(tmp_path):
    one, other, third = (tmp_path / name for name in ("1.txt", "2.txt", "3"))
    generating.generate(one, 200, seed=1)
    generating.generate(other, 200, seed=1)
    generating.generate(third, 200, seed=2)
    assert one.read_bytes() == other.read_bytes() != third.read_bytes()
    # A file is written again only if its arguments differ.
    one.write_text("kept")
    generating.generate(one, 200, seed=1)
    assert one.read_text() == "kept"
    generating.generate(one, 200, seed=2)
    assert one.read_bytes() == third.read_bytes()
