"""Models of TensorFlow Recommenders and deepctr with replaced layers.

The models are the models of `recommenders.py`, trained with Adagrad. The models
of deepctr have no regularizer of the tables, whose layers would not be
replaced.
"""

import sys
from typing import Any

import numpy as np
import tensorflow as tf

from tests.real.library import recommenders
from tests.real.library.replaced_embeddings import (
    BATCH,
    RATE,
    ReplacedCase,
    print_times,
)


def _tf_keras() -> Any:
    # The imports may draw random numbers, so they must precede the seed.
    import deepctr.models  # noqa: F401
    import tensorflow_recommenders  # noqa: F401
    import tf_keras

    return tf_keras


def _arrays(num_rows: int, num_samples: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        **{name: rng.integers(0, num_rows, num_samples) for name in "abcd"},
        **{
            name: rng.normal(size=num_samples).astype(np.float32)
            for name in "xyz"
        },
    }


def _labels(num_samples: int) -> np.ndarray:
    return (np.arange(num_samples) % 2).astype(np.float32)


def _dictionaries(num_rows: int, num_samples: int) -> dict[str, Any]:
    features: dict[str, Any] = _arrays(num_rows, num_samples)
    features["label"] = _labels(num_samples)[:, None]
    return {"x": tf.data.Dataset.from_tensor_slices(features).batch(BATCH)}


def _columns(num_rows: int, num_samples: int) -> dict[str, Any]:
    return {
        "x": _arrays(num_rows, num_samples),
        "y": _labels(num_samples),
        "batch_size": BATCH,
    }


def _tfrs(make: Any, num_replaced: int) -> ReplacedCase:
    def model(num_rows: int) -> Any:
        before, recommenders.ROWS = recommenders.ROWS, num_rows
        try:
            found = make()
        finally:
            recommenders.ROWS = before
        found.compile(_tf_keras().optimizers.Adagrad(RATE))
        return found

    return ReplacedCase(_tf_keras, model, _dictionaries, num_replaced)


def _deepctr(name: str, num_replaced: int) -> ReplacedCase:
    def model(num_rows: int) -> Any:
        import deepctr.models
        from deepctr.feature_column import DenseFeat, SparseFeat

        columns = [
            *(SparseFeat(one, num_rows, embedding_dim=8) for one in "abcd"),
            *(DenseFeat(one, 1) for one in "xyz"),
        ]
        found = getattr(deepctr.models, name)(
            columns,
            columns,
            l2_reg_embedding=0,
            l2_reg_linear=0,
            task="binary",
        )
        found.compile(_tf_keras().optimizers.Adagrad(RATE), "mse")
        return found

    return ReplacedCase(_tf_keras, model, _columns, num_replaced)


CASES = {
    "tfrs, retrieval": _tfrs(recommenders.retrieval, 2),
    "tfrs, ranking": _tfrs(recommenders.ranking, 2),
    "tfrs, cross": _tfrs(recommenders.cross, 4),
    # The linear part of each model has a table of one column per feature.
    **{
        f"deepctr, {name}": _deepctr(name, 8)
        for name in ("AutoInt", "DCN", "DeepFM", "FNN", "NFM", "WDL", "xDeepFM")
    },
}


if __name__ == "__main__":
    print_times(CASES, "".join(sys.argv[1:]))
