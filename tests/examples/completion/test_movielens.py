"""Tests the reader of MovieLens with a mocked data set."""

import numpy as np
import pytest
from completion.data import movielens
from completion.data.corpus import DataError
from completion.data.ragged import Ragged

TITLES = [b"Toy Story (1995)", b"Heat (1995)", b"Casino (1995)"]


def ratings(users, movies, times, stars=None, genres=None):
    """Returns the columns of a small data set, by name."""
    count = len(users)
    return {
        "user_id": np.array([b"%d" % user for user in users]),
        "movie_id": np.array([b"%d" % movie for movie in movies]),
        "movie_title": np.array([TITLES[movie] for movie in movies], object),
        "timestamp": np.array(times),
        "user_rating": np.array(stars or [3.0] * count, np.float32),
        "user_gender": np.array([user == 1 for user in users]),
        "bucketized_user_age": np.full(count, 25.0, np.float32),
        "user_occupation_text": np.full(count, b"artist"),
        "movie_genres": Ragged.from_lists(genres or [[0]] * count),
    }


def test_document_is_the_ratings_of_a_user_in_time_order():
    corpus = movielens.corpus_of_ratings(
        ratings([2, 1, 2, 1], [0, 1, 2, 0], [20, 30, 10, 30])
    )
    assert corpus.documents == ["1", "2"]
    assert corpus.document_splits.tolist() == [0, 2, 4]
    names = [corpus.item_names[item] for item in corpus.items]
    # User 1 rated two movies at the same time. The movie with the smaller id is
    # first.
    assert names == [
        "Toy Story (1995)",
        "Heat (1995)",
        "Casino (1995)",
        "Toy Story (1995)",
    ]
    places = [
        [corpus.place_names[place] for place in row]
        for row in corpus.places.to_lists()
    ]
    assert places == [
        ["gender 1", "age 25", "occupation artist"],
        ["gender 0", "age 25", "occupation artist"],
    ]


def test_scopes_and_marks_describe_the_previous_movie():
    corpus = movielens.corpus_of_ratings(
        ratings(
            [1, 1, 2],
            [0, 1, 2],
            [1, 2, 3],
            stars=[5.0, 2.0, 4.0],
            genres=[[3, 1], [2], [4]],
        )
    )
    scopes = [
        [corpus.scope_names[scope] for scope in row]
        for row in corpus.scopes.to_lists()
    ]
    assert scopes == [[], ["genre 3", "genre 1"], []]
    before = corpus.marks[corpus.mark_splits[0] : corpus.marks_before[1]]
    assert [corpus.mark_names[mark] for mark in before] == ["5 stars"]
    assert corpus.marks_before[2] == corpus.mark_splits[1]


def test_missing_network_error_names_the_offline_data(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets")

    def unreachable():
        raise OSError("Name or service not known")

    monkeypatch.setattr(movielens, "check_network", unreachable)
    with pytest.raises(DataError, match="--data=stdlib.*service not known"):
        movielens.read_movielens(tmp_path)


def test_missing_tensorflow_datasets_error_names_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorflow_datasets", None)
    with pytest.raises(
        DataError, match="pip install tensorflow-datasets.*--data=stdlib"
    ):
        movielens.read_movielens()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_program_runs_on_mocked_ratings(tmp_path, monkeypatch, capsys):
    tfds = pytest.importorskip("tensorflow_datasets")
    import tensorflow as tf
    from completion import run
    from completion.report import Report
    from completion.settings import Settings

    draw = np.random.default_rng(2)
    # Each user rates consecutive movies, so the next movie is predictable.
    walks = [
        (user, int(start + step) % 40, step)
        for user, start in enumerate(draw.integers(40, size=60))
        for step in range(30)
    ]

    def as_dataset(builder, *args, **kwargs):
        del args, kwargs

        def generate():
            for user, movie, step in walks:
                yield builder.info.features.encode_example(
                    {
                        "movie_id": str(movie),
                        "movie_title": f"Part {movie}",
                        "movie_genres": [movie % 18, 18][: 1 + movie % 2],
                        "user_id": str(user),
                        "user_rating": 1.0 + movie % 5,
                        "timestamp": step,
                        "user_gender": bool(user % 2),
                        "bucketized_user_age": 25.0,
                        "raw_user_age": 27.0,
                        "user_occupation_label": user % 20,
                        "user_occupation_text": "artist",
                        "user_zip_code": "0",
                    }
                )

        features = builder.info.features.get_tensor_info()
        return tf.data.Dataset.from_generator(
            generate,
            output_signature=tf.nest.map_structure(
                lambda info: tf.TensorSpec(info.shape, info.dtype), features
            ),
        ).map(
            lambda example: {
                **example,
                "movie_genres": tf.reshape(example["movie_genres"], [-1]),
            }
        )

    monkeypatch.setattr(movielens, "check_network", lambda: None)
    with tfds.testing.mock_data(
        num_examples=len(walks), as_dataset_fn=as_dataset
    ):
        corpus = movielens.read_movielens()
    assert corpus.num_positions == len(walks)
    assert len(corpus.item_names) == 40
    run.run(
        corpus,
        Settings(num_steps=60, batch_size=128),
        Report(),
        data="movielens",
        model_dir=str(tmp_path),
        fresh=False,
        save_every=60,
        max_held_out=1000,
    )
    printed = capsys.readouterr().out
    assert "movielens/100k-ratings" in printed
    assert (
        "A process without tf_layoutmap returned the same 10 offers" in printed
    )
