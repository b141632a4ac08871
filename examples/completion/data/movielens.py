"""Reads MovieLens 100K as a corpus: what each user rated, in order."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from completion.data.corpus import Corpus, DataError, Names
from completion.data.ragged import Ragged, splits_of

DATASET = "movielens/100k-ratings"

_OFFLINE = (
    "--data=stdlib (the default) and --data=FOLDER need neither "
    "network nor data sets."
)
_HOST = "files.grouplens.org"
_BATCH = 4096


def read_movielens(data_dir: Path | None = None) -> Corpus:
    """Returns the corpus of MovieLens; loads it if it is not on the disk.

    Args:
      data_dir: Where TensorFlow Datasets keeps its data; its own choice
        unless told.

    Raises:
      DataError: TensorFlow Datasets is not installed, or cannot get the data.
    """
    import tensorflow as tf

    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise DataError(
            "--data=movielens needs TensorFlow Datasets: `pip install "
            f"tensorflow-datasets`. {_OFFLINE} Received: {error}."
        ) from error
    try:
        builder = tfds.builder(DATASET, data_dir=data_dir)
        if not builder.is_prepared():
            check_network()
            builder.download_and_prepare()
        ratings = builder.as_dataset(split="train").ragged_batch(_BATCH)
        # An iterator that autotunes can take a minute to end.
        options = tf.data.Options()
        options.autotune.enabled = False
        columns = _read_columns(tfds.as_numpy(ratings.with_options(options)))
    # What a missing network raises depends on the layer that misses it.
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DataError(
            f"--data=movielens needs {DATASET}, on the disk or by the "
            f"network. {_OFFLINE} Received: {type(error).__name__}: "
            f"{reason[:300]}"
        ) from error
    return corpus_of_ratings(columns)


def check_network() -> None:
    """Raises `OSError` at once if the host of the data cannot be reached.

    The download itself tries again for many minutes before it gives up.
    """
    if urllib.request.getproxies():
        return  # Only the proxy knows.
    socket.create_connection((_HOST, 443), timeout=10).close()


def _read_columns(batches) -> dict[str, np.ndarray | Ragged]:
    wanted = (
        "user_id",
        "movie_id",
        "movie_title",
        "user_rating",
        "timestamp",
        "user_gender",
        "bucketized_user_age",
        "user_occupation_text",
    )
    parts = {name: [] for name in wanted}
    genres, genre_lengths = [], []
    for batch in batches:
        for name in wanted:
            parts[name].append(np.asarray(batch[name]))
        genres.append(np.asarray(batch["movie_genres"].flat_values))
        genre_lengths.append(np.asarray(batch["movie_genres"].row_lengths()))
    columns = {name: np.concatenate(values) for name, values in parts.items()}
    columns["movie_genres"] = Ragged(
        np.concatenate(genres).astype(np.int32),
        splits_of(np.concatenate(genre_lengths)),
    )
    return columns


def corpus_of_ratings(columns: Mapping[str, np.ndarray | Ragged]) -> Corpus:
    """Makes each user a document and each rating a position.

    Args:
      columns: One entry per rating, named as in TensorFlow Datasets; strings
        as bytes, `movie_genres` ragged.
    """
    movies, marks, places, genres = Names(), Names(), Names(), Names()
    # Users rate many movies in one second; the movie decides then, so that
    # the order is the same in every run.
    order = np.lexsort(
        (columns["movie_id"], columns["timestamp"], columns["user_id"])
    )
    users, counts = np.unique(columns["user_id"], return_counts=True)
    splits = splits_of(counts)
    items = np.array(
        [
            movies.number(title.decode())
            for title in columns["movie_title"][order]
        ],
        np.int32,
    )
    stars = np.array(
        [
            marks.number(f"{rating:g} stars")
            for rating in columns["user_rating"][order]
        ],
        np.int32,
    )
    first = order[splits[:-1]]
    attributes = zip(
        columns["user_gender"][first],
        columns["bucketized_user_age"][first],
        columns["user_occupation_text"][first],
        strict=True,
    )
    document_places = Ragged.from_lists(
        places.numbers(
            [
                f"gender {int(gender)}",
                f"age {age:g}",
                f"occupation {occupation.decode()}",
            ]
        )
        for gender, age, occupation in attributes
    )

    # Known before a position is the genre of the movie before it.
    ordered_genres = columns["movie_genres"].take(order)
    names = sorted(set(ordered_genres.values.tolist()))
    row_of = {genre: genres.number(f"genre {genre}") for genre in names}
    by_position = ordered_genres.to_lists()
    begins = set(splits[:-1].tolist())
    scopes = Ragged.from_lists(
        []
        if position in begins
        else [row_of[genre] for genre in by_position[position - 1]]
        for position in range(len(items))
    )
    return Corpus(
        item_names=list(movies),
        mark_names=list(marks),
        place_names=list(places),
        scope_names=list(genres),
        documents=[user.decode() for user in users],
        items=items,
        document_splits=splits,
        marks=stars,
        mark_splits=splits,
        marks_before=np.arange(len(items)),
        places=document_places,
        scopes=scopes,
        facts=[
            ("source", DATASET),
            ("users", f"{len(users):,}"),
            ("ratings", f"{len(items):,}"),
        ],
        words={"document": "user", "item": "movie"},
    )
