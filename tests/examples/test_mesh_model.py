"""Training a tower on a mesh matches training it on the host."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from completion.data.corpus import DataError  # noqa: E402
from completion.data.features import SEQUENCES  # noqa: E402
from completion.mesh_model import MeshCompleter  # noqa: E402
from completion.model import FEATURE_SPECS, Completer  # noqa: E402
from completion.plan import Plan  # noqa: E402
from completion.settings import Settings  # noqa: E402

from tests.layout.meshes import axes_of, mesh_of  # noqa: E402

NUM_ROWS = {"history": 40, "marks": 9, "place": 7, "scope": 8, "pieces": 50}
ROWS_OF = {"bag": "history", "echo": "history", "recent": "history"}
LOG_SHARES = np.full(40, -3.0, np.float32)
# Devices of a mesh add numbers in a different order.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def plan_of(**options):
    # Dropout is disabled, because it draws different numbers on a mesh.
    return Plan(
        NUM_ROWS,
        Settings(
            **{
                "dim": 8,
                "hidden": 16,
                "dropout": 0.0,
                "num_shards": 2,
                "num_steps": 4,
                **options,
            }
        ),
    )


def batch(seed, num_samples=8):
    draw = np.random.default_rng(seed)
    features = {}
    for name in FEATURE_SPECS:
        rows = NUM_ROWS[ROWS_OF.get(name, name)]
        longest = min(SEQUENCES.get(name, 6), 6)
        features[name] = tf.ragged.constant(
            [
                draw.choice(
                    rows - 1, draw.integers(0, longest + 1), replace=False
                )
                + 1
                for _ in range(num_samples)
            ],
            dtype=tf.int32,
            ragged_rank=1,
            row_splits_dtype=tf.int64,
        )
    negatives = np.sort(draw.choice(39, 5 + seed, replace=False) + 1)
    return (
        features,
        tf.constant(draw.integers(1, 40, num_samples), tf.int32),
        tf.constant(negatives, tf.int32),
        tf.fill([len(negatives)], -2.0),
    )


def state_of(model):
    return {
        **{f"tower {w.path}": w.numpy() for w in model.tower.weights},
        **{
            f"slot {v.path.split('/')[-1]}": v.numpy()
            for v in model.optimizer.variables
        },
        **{
            table.name: tf.convert_to_tensor(rows).numpy()
            for table, rows in model.embedding.embedding_tables.items()
        },
    }


def assert_same_state(first, second):
    first, second = state_of(first), state_of(second)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(
            value, second[name], err_msg=name, **TOLERANCE
        )


@pytest.fixture(scope="module")
def refs():
    """Returns both models and their losses after three different steps."""
    host = Completer(plan_of(), LOG_SHARES)
    mesh = MeshCompleter(plan_of(), LOG_SHARES, mesh_of(batch=2, model=2))
    losses = [
        [
            float(model.train_step(*batch(seed, size)))
            for seed, size in ((0, 8), (1, 7), (2, 8))
        ]
        for model in (host, mesh)
    ]
    return host, mesh, losses


@pytest.mark.exhaustive
@pytest.mark.slow
def test_losses_tables_tower_and_slots_are_equal(refs):
    host, mesh, losses = refs
    np.testing.assert_allclose(losses[0], losses[1], **TOLERANCE)
    assert_same_state(host, mesh)
    assert int(mesh.step) == 3
    assert int(mesh.optimizer.iterations) == 3


@pytest.mark.exhaustive
def test_tower_is_sharded(refs):
    axes = {w.path: axes_of(w) for w in refs[1].tower.weights}
    assert axes["hidden/kernel"] == (None, "model")
    assert axes["query/kernel"] == ("model", None)
    assert refs[1].layout_map.explain(refs[1].tower).ok


@pytest.mark.exhaustive
def test_ranks_and_offers_are_equal(refs):
    host, mesh, _ = refs
    features, target, *_ = batch(5, 7)
    np.testing.assert_allclose(
        host.scores(features), mesh.scores(features), **TOLERANCE
    )
    assert mesh.ranks(features, target).numpy().tolist() == (
        host.ranks(features, target).numpy().tolist()
    )
    assert mesh.complete(features, 3)[1].numpy().tolist() == (
        host.complete(features, tf.constant(3))[1].numpy().tolist()
    )


@pytest.mark.exhaustive
def test_a_checkpoint_knows_of_no_mesh(refs, tmp_path):
    host, mesh, _ = refs
    mesh.before_save()
    path = tf.train.Checkpoint(**mesh.saved_parts()).write(
        str(tmp_path / "mesh")
    )
    restored = Completer(plan_of(), LOG_SHARES)
    tf.train.Checkpoint(**restored.saved_parts()).read(path).assert_consumed()
    assert_same_state(host, restored)
    path = tf.train.Checkpoint(**host.saved_parts()).write(
        str(tmp_path / "host")
    )
    restored = MeshCompleter(plan_of(), LOG_SHARES, mesh_of(batch=1, model=4))
    tf.train.Checkpoint(**restored.saved_parts()).read(path).assert_consumed()
    restored.after_restore()
    assert_same_state(host, restored)


def test_mesh_that_does_not_divide_the_tower_raises():
    with pytest.raises(DataError, match="hidden layer of 15 units.*: 2"):
        MeshCompleter(plan_of(hidden=15), LOG_SHARES, mesh_of(batch=1, model=2))
