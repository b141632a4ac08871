"""Tests `next_identifier.py --open_vocabulary` and its model."""

import re

import numpy as np
import pytest
from completion import names, stream, stream_run
from completion.data import python_source
from completion.data.corpus import Corpus
from completion.data.ragged import Ragged
from completion.data.vocabulary import ItemVocabulary
from completion.report import Report
from completion.settings import Settings

PROGRAM = "next_identifier.py"


def corpus_of(items, num_names):
    """Returns a corpus of one document that has only items."""
    num = len(items)
    none = np.zeros(num, np.int64)
    return Corpus(
        item_names=[f"name{number}" for number in range(num_names)],
        mark_names=[],
        place_names=[],
        scope_names=[],
        documents=["a"],
        items=np.array(items, np.int32),
        document_splits=np.array([0, num]),
        marks=none.astype(np.int32),
        mark_splits=np.array([0, 0]),
        marks_before=none,
        places=Ragged.from_lists([[]]),
        scopes=Ragged.from_lists([[]] * num),
        facts=[],
        words={"item": "identifier", "document": "file"},
    )


def vocabularies_of(corpus):
    return {
        "closed": names.ClosedNames(
            ItemVocabulary(corpus.items, corpus.item_names, min_count=1)
        ),
        "hashed": names.HashedNames(corpus.item_names, 1000),
        "open": names.OpenNames(corpus.item_names, 60),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["closed", "hashed", "open"])
def test_what_always_follows_is_learned(kind):
    corpus = corpus_of(np.tile(np.arange(12), 90), 20)
    learner = stream.StreamLearner(
        vocabularies_of(corpus)[kind], corpus, num_negatives=16, seed=1
    )
    positions = np.arange(corpus.num_positions)
    for batch in stream.batches_in_order(positions, 32):
        learner.train(batch)
    ranks = learner.ranks(positions[-24:], np.arange(20))
    assert np.mean(ranks == 1) > 0.8
    # Targets that are not among the offered items are misses.
    assert not learner.ranks(positions[-12:], np.array([15, 19])).any()
    used = {"closed": 2 * 13, "hashed": 2000, "open": 2 * 12}
    assert learner.rows_used == used[kind]


def test_names_with_the_same_row_share_their_mean_rank():
    corpus = corpus_of(np.arange(6), 6)
    learner = stream.StreamLearner(
        names.HashedNames(corpus.item_names, 1), corpus, num_negatives=4, seed=1
    )
    assert learner.ranks(np.arange(6), np.arange(6)).tolist() == [3.5] * 6


def figures_of(printed):
    """Returns recall@10, MRR and the number of used rows of each model."""
    return {
        name: (float(recall), float(mrr), rows.replace(",", ""))
        for name, recall, mrr, rows in re.findall(
            r"│ ([a-z ]+?) +│ +([\d.]+) │ +([\d.]+) │ +([\d,]*) +│", printed
        )
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_learns_as_much_as_with_a_vocabulary(capsys, sources):
    corpus = python_source.read_folder(sources)
    stream_run.run(
        corpus, Settings(), Report(), capacity=6000, max_held_out=2000
    )
    figures = figures_of(capsys.readouterr().out)
    closed, opened = (
        figures[f"{kind} vocabulary"] for kind in ("closed", "open")
    )
    assert opened[0] > 0.9 * closed[0] > 0
    assert figures["most frequent"][0] < opened[0]
    # The number is even, because both tables of a closed vocabulary have the
    # same number of rows.
    assert int(closed[2]) % 2 == 0
    assert 0 < int(opened[2]) <= 2 * 6016


def test_open_vocabulary_on_a_mesh_raises(start):
    ended = start("--open_vocabulary", "--mesh=2x2")
    assert ended.returncode != 0
    assert "--open_vocabulary does not support --mesh" in ended.stderr


def test_too_few_positions_raise(error_message, tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = x\n")
    assert "at least 256 positions to train on" in error_message(
        lambda: stream_run.run(
            python_source.read_folder(tmp_path),
            Settings(),
            Report(),
            capacity=100,
            max_held_out=10,
        )
    )
