"""Exports the model, and runs the exported model without tf_layoutmap."""

from __future__ import annotations

import tempfile
from pathlib import Path

import elsewhere
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from completion.data.features import ECHOES, RECENT
from completion.data.ragged import Ragged
from completion.model import FEATURE_SPECS, tower_of
from completion.plan import TOWER_FEATURES, Plan
from completion.scoring import dense_ids, score_all, tower_input

_TOLERANCE = 1e-4
_ANSWERING = Path(__file__).with_name("answering.py")


class Served(tf.Module):
    """The exported module, which contains only TensorFlow's own operations."""

    def __init__(
        self,
        plan: Plan,
        names: list[str],
        log_shares: np.ndarray,
        checkpoint: str,
    ):
        """Restores the tables and the tower from a training checkpoint.

        Args:
          plan: Tables and features of the trained model.
          names: Name of each row.
          log_shares: `[num_rows]` log of each row's share of training.
          checkpoint: Path of the checkpoint.
        """
        super().__init__()
        self._plan = plan
        self._embedding = plan.served_embedding()
        self._embedding.build()
        self._tower = tower_of(plan)
        self._names = tf.constant(names)
        self._log_shares = tf.constant(log_shares)
        restored = tf.train.Checkpoint(
            embedding=self._embedding, tower=self._tower
        ).restore(checkpoint)
        # The optimizers of the checkpoint are not restored.
        restored.expect_partial().assert_existing_objects_matched()

    @tf.function(input_signature=[FEATURE_SPECS, tf.TensorSpec([], tf.int32)])
    def complete(self, features, num_offers):
        """Returns the names of the best items and their scores, best first."""
        tables = self._embedding.embedding_tables
        activations = tlm.serving.serving_embedding_lookup(
            {name: features[name] for name in TOWER_FEATURES},
            None,
            tables,
            self._plan.serving_features(),
        )
        scores, rows = tf.math.top_k(
            score_all(
                self._tower(
                    tower_input(activations, self._plan.tower_widths()),
                    training=False,
                ),
                dense_ids(features["recent"], RECENT),
                dense_ids(features["echo"], ECHOES),
                tables[self._plan.tables["candidates"]],
                self._log_shares,
            ),
            num_offers,
        )
        return {"names": tf.gather(self._names, rows), "scores": scores}


def export(served: Served, folder: Path) -> int:
    """Writes a SavedModel to `folder` and returns its size in bytes."""
    tf.saved_model.save(served, str(folder))
    return sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file()
    )


def ask_elsewhere(
    folder: Path, batch: dict[str, Ragged], num_offers: int
) -> tuple[list[list[str]], np.ndarray]:
    """Runs the exported model in a process that cannot import tf_layoutmap.

    Args:
      folder: Folder of the SavedModel.
      batch: Features of the positions.
      num_offers: Number of predicted items per position.

    Returns:
      Names and scores, `[num_positions, num_offers]`.

    Raises:
      RuntimeError: The process failed. The message contains its error output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch, "asked.npz"), Path(scratch, "out.npz")
        arrays = {"num_offers": np.int32(num_offers)}
        for name, rows in batch.items():
            arrays[f"{name}/values"] = rows.values
            arrays[f"{name}/splits"] = rows.splits
        np.savez(asked, **arrays)
        elsewhere.run(_ANSWERING, folder, asked, answered)
        with np.load(answered) as found:
            names = [
                [name.decode() for name in row]
                for row in found["names"].astype("S").tolist()
            ]
            return names, found["scores"]


def compare_answers(
    own_names: list[list[str]],
    own_scores: np.ndarray,
    names: list[list[str]],
    scores: np.ndarray,
) -> float:
    """Compares the predictions of the exported and the trained model.

    The exported model adds numbers in a different order. Scores may therefore
    differ in the last digits, and items with nearly equal scores may be
    swapped.

    Returns:
      The largest difference between the scores of the two models.

    Raises:
      RuntimeError: An item or a score differs by more than rounding explains.
        The message contains the position.
    """
    difference = np.abs(own_scores - scores)
    if not np.all(difference <= _TOLERANCE):
        worst = int(np.argmax(difference.max(axis=1)))
        raise RuntimeError(
            "The exported and the trained model must have equal scores within "
            f"{_TOLERANCE}. Received: {scores[worst].tolist()} "
            f"instead of {own_scores[worst].tolist()} (position {worst})."
        )
    for position, (own, found) in enumerate(zip(own_names, names, strict=True)):
        for offer in range(len(own)):
            gap = np.abs(own_scores[position] - own_scores[position][offer])
            equals = {
                own[other] for other in np.flatnonzero(gap <= 2 * _TOLERANCE)
            }
            # The last predicted items may have the same score as items that are
            # not among the predictions.
            last = gap[-1] <= 2 * _TOLERANCE
            if found[offer] not in equals and not last:
                raise RuntimeError(
                    "The exported model must return the offers of the trained "
                    f"model. Received: {found} instead of {own} (position "
                    f"{position})."
                )
    return float(difference.max())
