"""Reads MovieLens 100K as a corpus: the ratings of each user in time order."""

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
    "--data=stdlib (the default) and --data=FOLDER require neither a network "
    "nor a data set."
)
_HOST = "files.grouplens.org"
_BATCH = 4096


def read_movielens(data_dir: Path | None = None) -> Corpus:
    """Returns the corpus of MovieLens; downloads it if it is not on the disk.

    Args:
      data_dir: Data folder of TensorFlow Datasets, or None for its default
        folder.

    Raises:
      DataError: TensorFlow Datasets is not installed, or the data is neither on
        the disk nor downloadable.
    """
    import tensorflow as tf

    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise DataError(
            "--data=movielens requires TensorFlow Datasets: `pip install "
            f"tensorflow-datasets`. {_OFFLINE} Received: {error}."
        ) from error
    try:
        builder = tfds.builder(DATASET, data_dir=data_dir)
        if not builder.is_prepared():
            check_network()
            builder.download_and_prepare()
        ratings = builder.as_dataset(split="train").ragged_batch(_BATCH)
        # Deleting an iterator that autotunes can take a minute.
        options = tf.data.Options()
        options.autotune.enabled = False
        columns = _read_columns(tfds.as_numpy(ratings.with_options(options)))
    # The type of the error depends on the layer that detects the failure.
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DataError(
            f"--data=movielens requires {DATASET} on the disk or a network to "
            f"download it. {_OFFLINE} Received: {type(error).__name__}: "
            f"{reason[:300]}"
        ) from error
    return corpus_of_ratings(columns)


def check_network() -> None:
    """Raises `OSError` without delay if the host of the data is unreachable.

    The download itself retries for many minutes before it raises.
    """
    if urllib.request.getproxies():
        return  # A host that only the proxy can reach would look unreachable.
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
    """Returns a corpus of one document per user and one position per rating.

    Args:
      columns: Arrays with one entry per rating, by their names in TensorFlow
        Datasets. Strings are bytes; `movie_genres` is ragged.
    """
    movies, marks, places, genres = Names(), Names(), Names(), Names()
    # Users rate many movies within one second. Sorting also by movie makes the
    # order identical in every run.
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

    # The features of a position use the genres of the previous movie, which are
    # already known at this position.
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
