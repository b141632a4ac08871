"""Errors of DTensor's compiler with long programs end in a short message."""

import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap._core import tf_private
from tf_layoutmap.layout import default_mesh, to_mesh
from tf_layoutmap.layout.mesh import errors
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError

import tf_keras  # isort: skip

MESH = mesh_of(batch=2, model=2)
BATCH = layout_of(MESH, "batch", None)
# An attribute of an op in the programs that DTensor's compiler prints.
LINE = (
    '    %{0} = "tf.Reshape"(%1) {{_layout = ["sharding_specs:batch, '
    'mesh:|batch=2|0,1|0,1|/job:localhost/replica:0/task:0/device:CPU:0"]}} '
    ": (tensor<8x2xi32>) -> tensor<16xi32>\n"
)


def text(length: int) -> str:
    """Returns an error of the compiler with at least `length` characters."""
    first = (
        "step.py:1:1: error: 'tf.Tanh' op cannot be sharded\n"
        'step.py:1:1: note: see current operation: %1 = "tf.Tanh"(%0)\n'
        'note: see current operation: \n"builtin.module"() ({{\n'
    )
    count = length // len(LINE) + 1
    program = "".join(LINE.format(i) for i in range(count))
    return first + program + "tensorflow/dtensor_graph_to_mlir_pass.cc:152 ::"


@pytest.fixture(autouse=True)
def deadline():
    """Raises an error in a case that does not end."""

    def late(*_):
        raise TimeoutError("The message of an error was searched for 20 s.")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=[10_000, 1_000_000])
def failing_functions(request, monkeypatch):
    """Lets the compiler reject all functions, with a long message."""
    original = tf_private.pywrap_tfe.TFE_Py_Execute

    def execute(*args):
        if tf_private.op_def_of(tf.compat.as_str(args[2])) is None:
            raise tf.errors.UnknownError(None, None, text(request.param))
        return original(*args)

    monkeypatch.setattr(tf_private.pywrap_tfe, "TFE_Py_Execute", execute)


def check(call):
    with pytest.raises(UnsupportedByDTensorError, match="be sharded") as error:
        call()
    assert len(str(error.value)) < 700
    # Programs print the cause, too.
    assert len(str(error.value.__cause__)) < 2100


def fit(package):
    mesh_layout = tlm.LayoutMap(MESH)
    with tlm.layout_map_scope(mesh_layout):
        model = package.Sequential(
            [
                package.Input((8,)),
                package.layers.Dense(4, activation="tanh"),
            ]
        )
    model.compile("sgd", "mse")
    model.fit(pairs.FEATURES, np.zeros((32, 4)), batch_size=8, verbose=0)


def call_function():
    function = tf.function(lambda x: tf.tanh(x), autograph=False)
    with default_mesh(MESH):
        function(to_mesh(np.ones((4, 2), np.float32), BATCH))


@pytest.mark.usefixtures("failing_functions")
@pytest.mark.parametrize(
    "call",
    [
        lambda: fit(keras),
        lambda: fit(tf_keras),
        call_function,
    ],
    ids=["keras", "tf_keras", "function"],
)
@pytest.mark.filterwarnings("ignore::tf_layoutmap.layout.LayoutMapWarning")
def test_a_long_error_of_a_function_is_explained(call):
    check(call)


@pytest.mark.parametrize("length", [10_000, 1_000_000])
def test_the_finding_of_a_long_error(length):
    assert "Tanh" in errors.finding_of(text(length))
    assert errors.stopped_at(text(length)) == "Tanh"
    line = "e" * length + " dtensor_graph_to_mlir_pass"
    assert len(errors.finding_of(line)) <= 160


@pytest.mark.parametrize(
    "message",
    [
        "",
        "no tag",
        "{{node a/b_1}}",
        "123{{node Foo}}456\n{{function_node Bar}}789{{node a.b-c}}",
        "{{{node a}}} {{ node b}} {{node }} {{node  c}} {{function_node d}}\n",
        "{{function_node __inference_f_1}}{{function_node __inference_g_2}}x",
        "{{colocation_node a}} {{node\nb}} {{a b c}} {{{{x y}}",
    ],
)
def test_tags_are_those_that_tensorflow_finds(message):
    replaced = tf_private.error_interpolation.parse_message
    expected = replaced.__wrapped__(message)
    assert replaced(message) == expected
