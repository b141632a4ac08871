"""Tables on a mesh of devices without the kernels of this package.

The updates for GPUs and TPUs run on CPUs here, and are compared with the same
layer on the host.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers.keras3 import test_mesh_embedding as models
from tests.layers.models import weighted_sum
from tests.layout.meshes import axes_of, mesh_of
from tf_layoutmap.layout.keras3 import embedding_rows, row_updates
from tf_layoutmap.layout.mesh import transfer

pytestmark = pytest.mark.filterwarnings(
    "error::tf_layoutmap.layout.LayoutMapWarning"
)
rules = models.rules
RULES = {
    **models.RULES,
    "adagrad_momentum": lambda: rules.AdagradMomentum(
        0.5, momentum=0.5, use_nesterov=True, exponent=3, beta2=0.75
    ),
    "scaled ftrl": lambda: rules.FTRL(
        0.5,
        l1_regularization_strength=0.125,
        multiply_linear_by_learning_rate=True,
    ),
    "decayed": lambda: rules.SGD(
        0.5,
        weight_decay_factor=0.125,
        multiply_weight_decay_factor_by_learning_rate=True,
        clip_weight_min=-0.03,
        clip_weight_max=0.02,
    ),
}
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(embedding_rows, "has_kernels", lambda mesh: False)

    def fail(*args, **kwargs):
        raise AssertionError("a kernel was called")

    for name in ("lookup_rows", "update_rows"):
        monkeypatch.setattr(embedding_rows.dtensor_ops, name, fail)


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(batch=2, model=2)


def assert_equal_tables(first, second):
    first, second = map(models.table_of, (first, second))
    variables = [
        {"embeddings": layer.embeddings, **layer.optimizer.slots}
        for layer in (first, second)
    ]
    assert [*variables[0]] == [*variables[1]]
    for name, variable in variables[0].items():
        np.testing.assert_allclose(
            variable.numpy(), variables[1][name].numpy(), rtol=2e-5, atol=1e-6
        )


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("rule", RULES)
def test_fit_equals_a_table_on_the_host(mesh, rule):
    host = models.model_of(RULES[rule]())
    meshed = models.on_mesh(mesh, RULES[rule]())
    for model in (host, meshed):
        models.fit(model, NUM_STEPS)
    assert_equal_tables(host, meshed)
    assert axes_of(models.table_of(meshed).embeddings) == models.ROWS


@pytest.mark.slow
def test_eager_steps_equal_a_table_on_the_host(mesh):
    host = models.model_of(RULES["adagrad"]())
    meshed = models.on_mesh(mesh, RULES["adagrad"]())
    for model in (host, meshed):
        models.fit(model, 2, run_eagerly=True)
    assert_equal_tables(host, meshed)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("optimizer", models.FOLLOWED)
def test_a_table_follows_the_optimizer_of_the_model(mesh, optimizer):
    # Each id occurs once in a batch, because Keras squares each gradient of a
    # repeated id separately.
    rng = np.random.default_rng(4)
    shape = models.BATCH, models.LENGTH
    ids = np.concatenate(
        [rng.permutation(models.NUM_ROWS).reshape(shape) for _ in range(4)]
    )
    host, meshed = models.model_of("model"), models.on_mesh(mesh, "model")
    for model in (host, meshed):
        model.compile(models.FOLLOWED[optimizer](), loss=weighted_sum)
        model.fit(
            ids,
            models.Y[: len(ids)],
            batch_size=models.BATCH,
            shuffle=False,
            verbose=0,
        )
    assert_equal_tables(host, meshed)


def test_constraints_apply_to_the_rows_of_a_step(mesh):
    constraint = {"embeddings_constraint": keras.constraints.UnitNorm(axis=1)}
    host = models.model_of(RULES["adagrad"](), **constraint)
    meshed = models.on_mesh(mesh, RULES["adagrad"](), **constraint)
    for model in (host, meshed):
        models.fit(model, 2)
    assert_equal_tables(host, meshed)


def test_a_padded_table_equals_a_table_on_the_host(mesh):
    # The number of rows is odd.
    ids = np.random.default_rng(1).integers(0, 7, [8, 3])

    def model():
        layer = tlm.layers.ShardedEmbedding(
            7, 2, optimizer=RULES["adagrad"](), name="words"
        )
        return keras.Sequential([keras.Input([3], dtype="int64"), layer])

    keras.utils.set_random_seed(1)
    host = model()
    with models.scope(mesh):
        keras.utils.set_random_seed(1)
        meshed = model()
    for one in (host, meshed):
        one.compile("sgd", loss=weighted_sum)
        one.fit(
            ids, models.Y[:8, :, :2], batch_size=4, shuffle=False, verbose=0
        )
    assert_equal_tables(host, meshed)
    np.testing.assert_allclose(
        host.predict(ids, verbose=0), meshed.predict(ids, verbose=0), rtol=1e-5
    )


def test_gradients_of_equal_ids_must_be_summed(mesh):
    meshed = models.on_mesh(
        mesh, rules.SGD(0.5, use_gradient_accumulation=False)
    )
    with pytest.raises(NotImplementedError, match="must sum the gradients"):
        models.fit(meshed, 1)


@pytest.mark.parametrize("in_a_function", [False, True])
def test_ids_outside_of_the_table_are_ignored(mesh, in_a_function):
    # The table has seven rows, and one row of padding.
    with models.scope(mesh):
        layer = tlm.layers.ShardedEmbedding(7, 2, optimizer="sgd", name="words")
        layer.build([None])
    weight = layer.embeddings
    before = weight.numpy()
    ids, gradients = (
        transfer.to_mesh(x, models.dtensor.Layout.replicated(mesh, x.ndim))
        for x in (
            np.array([5, -1, 7, 0, 5, 100, -8]),
            np.arange(14, dtype=np.float32).reshape(7, 2),
        )
    )

    def update():
        embedding_rows.update(
            weight,
            [],
            ids,
            gradients,
            optimizer="sgd",
            hyperparameters=tf.constant([1.0]),
            skips_unowned_ids=False,
        )

    with tlm.layout.default_mesh(mesh):
        (tf.function(update) if in_a_function else update)()
    before[5] -= [8, 10]
    before[0] -= [6, 7]
    np.testing.assert_allclose(weight.numpy(), before, rtol=1e-6)
    padding = transfer.to_host(transfer.read_divided(weight.divided_value))[7:]
    np.testing.assert_array_equal(padding, 0)


def test_the_update_of_a_user_raises(mesh):
    with models.scope(mesh):
        layer = tlm.layers.ShardedEmbedding(8, 2, optimizer="sgd", name="words")
        layer.build([None])
    row_updates._register()
    variable = layer.embeddings.divided_value
    with (
        tlm.layout.default_mesh(mesh),
        pytest.raises(NotImplementedError, match="tensor_scatter_nd_update"),
    ):
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=variable.handle,
            indices=tf.constant([[0]]),
            updates=tf.ones([1, 2]),
        )
