"""Tests the text, n-gram models and settings of the Transformer program."""

import doctest
import importlib
import types

import logical_mesh
import numpy as np
import pytest
from completion.data.corpus import DataError
from transformer.baselines import ngram_loss
from transformer.settings import Settings, SettingsError
from transformer.text import OTHER, Characters, Text


def read(root, **options):
    return Text(
        root,
        frozenset(),
        "here",
        **{"vocabulary_size": 50, "context": 4, "seed": 1, **options},
    )


@pytest.fixture
def folder(tmp_path):
    for index in range(8):
        (tmp_path / f"file_{index}.py").write_text(f"x_{index} = {index}\n" * 5)
    return tmp_path


def test_rare_characters_share_row_zero():
    characters = Characters("aaabbc\né", size=4)
    assert len(characters) == 4
    assert characters.text(characters.rows("baba")) == "baba"
    assert characters.rows("éz").tolist() == [OTHER, OTHER]
    assert characters.rows("").tolist() == []


def test_held_out_text_is_not_in_the_training_text(folder):
    text = read(folder)
    training = text.characters.text(text.training)
    held_out = text.characters.text(text.held_out)
    assert len(training) + len(held_out) == sum(
        len(path.read_text()) for path in folder.iterdir()
    )
    names = {line.split()[0] for line in training.splitlines()}
    assert names.isdisjoint(
        line.split()[0].replace("\ufffd", "") for line in held_out.splitlines()
    )


def test_windows_are_substrings_of_the_held_out_text(folder):
    text = read(folder)
    windows = text.measured_windows(4, 7)
    assert windows.shape[1] == 5 and 0 < len(windows) <= 7
    held_out = text.held_out.tobytes()
    assert all(bytes(row.astype(np.uint8)) in held_out for row in windows)
    assert windows[-1].tolist() == text.held_out[-5:].tolist()


def test_file_that_is_not_text_is_skipped(folder):
    (folder / "bytes.py").write_bytes(b"x = '\xff'\n")
    assert read(folder).facts[1][1].startswith("8,")


@pytest.mark.parametrize(
    "context, words",
    [(4, "which is missing"), (4, "a file"), (400, "--context=400")],
)
def test_unusable_data_raises(folder, context, words):
    root = {"a file": folder / "file_0.py", "--context=400": folder}.get(
        words, folder / "missing"
    )
    with pytest.raises(DataError, match=words):
        read(root, context=context)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngram_loss_matches_counting_one_by_one(order):
    draw = np.random.default_rng(order)
    training, windows = draw.integers(0, 4, 60), draw.integers(0, 4, (3, 5))
    losses = []
    for window in windows:
        for place in range(1, 5):
            before = window[max(0, place + 1 - order) : place].tolist()
            counts = np.full(4, 0.1)
            for start in range(len(training) - len(before)):
                if training[start : start + len(before)].tolist() == before:
                    counts[training[start + len(before)]] += 1
            losses.append(-np.log(counts[window[place]] / counts.sum()))
    assert ngram_loss(training, windows, 4, order) == pytest.approx(
        np.mean(losses)
    )


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"batch_size": 7}, "--batch_size must be a multiple of 2, .*'batch'"),
        ({"num_heads": 3}, "--heads must be a multiple of 2, .*'model'"),
        ({"dim": 66}, "--dim must be a multiple of 4, the number of --heads"),
    ],
)
def test_sizes_that_the_mesh_does_not_divide_raise(wrong, words):
    with pytest.raises(SettingsError, match=words):
        Settings(**wrong).check()


@pytest.mark.parametrize("shape", ["", "2", "0x2", "2x", "2x2x2", "-1x2"])
def test_invalid_mesh_shape_raises(shape):
    assert not logical_mesh.is_shape(shape)
    with pytest.raises(ValueError, match="such as '2x2'"):
        logical_mesh.parse_shape(shape)


def test_generated_text_follows_the_scores_of_the_last_character():
    generation = pytest.importorskip("transformer.generation")
    characters = Characters("abcabcabc", size=4)

    def predict(window):
        # The predicted successor of row r is row r % 3 + 1.
        scores = np.full((*window.shape, 4), -50.0)
        np.put_along_axis(
            scores, (window % 3 + 1)[..., np.newaxis], 50.0, axis=-1
        )
        scores[..., OTHER] = 99.0
        return scores

    model = types.SimpleNamespace(
        input_shape=(None, 4), predict_on_batch=predict
    )
    assert generation.generate(
        model, characters, ["a", "abcab"], length=5, temperature=1.0, seed=0
    ) == ["abcabc", "abcabcabca"]


@pytest.mark.parametrize(
    "module",
    [
        "logical_mesh",
        "transformer.baselines",
        "transformer.settings",
        "transformer.text",
    ],
)
def test_examples_in_docstrings_pass(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0
