"""The table of patches is correct and complete, and patches can be undone."""

import inspect
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import forked_process
from tf_layoutmap import process_report
from tf_layoutmap._core import patch_entry, patches, requirements
from tf_layoutmap.layout.ops import corrections
from tf_layoutmap.ps import exits

dtensor = tf.experimental.dtensor
ROOT = pathlib.Path(__file__).parents[2]
ENTRIES = patches.all_entries()


def label(entry):
    return f"{entry.group}-{entry.owner.partition(':')[2]}.{entry.name}"


@pytest.fixture(scope="module", autouse=True)
def device():
    """Initializes DTensor's device, which stays initialized after the tests."""
    tlm.layout.to_mesh(
        [1.0],
        dtensor.Layout.replicated(
            dtensor.create_mesh([("x", 1)], devices=["CPU:0"]), 1
        ),
    )


@pytest.fixture
def restored():
    """Uninstalls all groups of patches for a test and installs them again."""
    before = dict(patches._counts)
    for group, count in before.items():
        for _ in range(count):
            patches.uninstall(group)
    yield
    for group in patches.GROUPS:
        while patches.is_installed(group):
            patches.uninstall(group)
        for _ in range(before.get(group, 0)):
            patches.install(group)


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_the_owner_and_the_replacement_exist(entry):
    owner = patches.owner_of(entry)
    assert hasattr(owner, entry.name) != entry.is_missing
    assert callable(entry.ours)
    if entry.make is not None:
        assert callable(entry.make)
    if entry.base is not None:
        assert entry.base in {other.key for other in ENTRIES}


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_an_entry_has_a_reason_and_names_its_test(entry):
    assert entry.why.endswith(".") and len(entry.why.split()) >= 4
    assert (ROOT / entry.test).is_file()
    supported = {
        patch_entry.TENSORFLOW: requirements.TENSORFLOW,
        patch_entry.KERAS: requirements.KERAS,
        patch_entry.TF_KERAS: requirements.TF_KERAS,
    }[entry.seen_in]
    assert entry.seen_in.split()[1] in supported


def test_the_page_of_patches_lists_every_group():
    page = (ROOT / "docs/replaced_names.md").read_text()
    named = re.findall(r"^\.\. replaced-names:: (\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(patches.GROUPS)


def test_a_name_has_one_entry_per_group_and_one_spelling():
    assert len({(entry.group, *entry.key) for entry in ENTRIES}) == len(ENTRIES)
    objects = {(id(patches.owner_of(entry)), entry.name) for entry in ENTRIES}
    assert len(objects) == len({entry.key for entry in ENTRIES})


def values():
    return {
        entry.key: inspect.getattr_static(
            patches.owner_of(entry), entry.name, None
        )
        for entry in ENTRIES
    }


def own(entry):
    return entry.name in vars(patches.owner_of(entry))


def test_uninstall_restores_every_name(restored):
    assert not tlm.process.patches()
    before, owned = values(), {entry.key: own(entry) for entry in ENTRIES}
    for group in patches.GROUPS:
        patches.install(group)
    changed = values()
    assert all(changed[key] is not before[key] for key in before)
    assert len(tlm.process.patches()) == len(ENTRIES)
    # The groups are uninstalled in a different order than in the patch table.
    for group in sorted(patches.GROUPS):
        patches.uninstall(group)
    after = values()
    assert all(after[key] is before[key] for key in before)
    assert owned == {entry.key: own(entry) for entry in ENTRIES}
    assert not tlm.process.patches()


def test_installations_of_a_group_are_counted(restored):
    original = keras.layers.Layer.__call__
    patches.install("keras3")
    patches.install("keras3")
    patches.uninstall("keras3")
    assert keras.layers.Layer.__call__ is not original
    patches.uninstall("keras3")
    assert keras.layers.Layer.__call__ is original
    with pytest.raises(RuntimeError, match="group 'keras3', which is not"):
        patches.uninstall("keras3")
    with pytest.raises(KeyError):
        patches.install("keras4")


def test_a_later_replacement_by_user_code_is_kept(restored):
    patches.install("keras3")
    ours = keras.layers.Layer.__call__

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    keras.layers.Layer.__call__ = theirs
    try:
        with pytest.raises(
            RuntimeError, match="Layer.__call__` was replaced by other code"
        ):
            patches.uninstall("keras3")
        assert keras.layers.Layer.__call__ is theirs
    finally:
        keras.layers.Layer.__call__ = ours


@pytest.mark.parametrize("group", patches.GROUPS)
def test_the_table_lists_all_replaced_names(group, restored):
    """Searches all of TensorFlow and Keras for functions of this package."""
    assert process_report.replaced_names() == []
    patches.install(group)
    found = process_report.replaced_names()
    placed = {
        id(inspect.getattr_static(patches.owner_of(entry), entry.name))
        for entry in patches.entries_of(group)
    }
    # Each patch is found once, even if TensorFlow stores the function in
    # several places.
    assert 0 < len(found) <= len(placed)


class CalledError(Exception):
    pass


# These patches do not depend on a context, so they are not tested outside of a
# context.
ALWAYS = {
    "reset_dtensor_device",
    "_set_optimization_parameters",
    "_gather_saveables_for_checkpoint",
    "parse_message",
    # The process has a mesh.
    "_get_new_group_key",
    "get_instance_key",
    # The program has enabled `keras.distribution`.
    "list_devices",
    "_to_backend_mesh",
    "_to_backend_layout",
}
PLAIN = [
    entry
    for entry in ENTRIES
    if entry.make is None and not entry.is_missing and entry.name not in ALWAYS
]


@pytest.mark.parametrize("entry", PLAIN, ids=label)
def test_without_a_context_the_original_receives_the_same_arguments(
    entry, monkeypatch
):
    """Calls each replacement with arguments unrelated to this package."""
    # Earlier tests of this process can have left a cluster.
    monkeypatch.setattr(exits, "_has_left", False)
    signature = inspect.signature(getattr(patches.owner_of(entry), entry.name))
    needed = {
        name: argument_of(entry, name)
        for name, one in signature.parameters.items()
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    expected = signature.bind(*needed.values())
    seen = []

    def original(*args, **kwargs):
        seen.append(signature.bind(*args, **kwargs))
        raise CalledError

    ours = entry.ours
    with pytest.raises(CalledError):
        result = patches.around(original, ours)(*expected.args)
        # The code of a context manager runs when the context is entered.
        result.__enter__()
    for one in (expected, *seen):
        one.apply_defaults()
    assert len(seen) == 1
    for name, value in expected.arguments.items():
        given = seen[0].arguments[name]
        assert is_same(value, given), name


OPERATIONS = [entry for entry in ENTRIES if entry.make is corrections.correct]


@pytest.mark.parametrize("entry", OPERATIONS, ids=label)
@pytest.mark.parametrize("traced", [False, True])
def test_without_a_mesh_an_op_receives_the_same_arguments(entry, traced):
    seen = []

    def original(*args, **kwargs):
        seen.append((args, kwargs))
        return tf.zeros([])

    def refuse(*args, **kwargs):
        raise AssertionError("called without a mesh")

    wrapper = entry.make(original, refuse)
    first, name = object(), object()

    def call():
        return wrapper(first, [1], name=name)

    (tf.function(call, autograph=False) if traced else call)()
    assert seen == [((first, [1]), {"name": name})]


def is_same(value, given):
    if isinstance(value, np.ndarray) or tf.is_tensor(value):
        return np.array_equal(value, given)
    return given is value or given == value


LISTS = {
    "grads",
    "trainable_variables",
    "variables",
    "grads_and_vars",
    "var_list",
    "vars",
    "operands",
}


def argument_of(entry, name):
    """Returns an argument unrelated to any layout map, mesh or table."""
    if name in LISTS:
        return []
    if name == "self":
        kind = entry.owner.rpartition(":")[2].rpartition(".")[2]
        return MADE.get(kind, Plain)()
    return NUMBERS.get((entry.name, name), Named(name))


class Named:
    def __init__(self, name):
        self.name = name
        self.shape = ()
        self.function_captures = self.function_cache = None


class Plain:
    """Stands in for a layer, variable or model that is on no mesh."""

    train_function = test_function = predict_function = None
    variables = ()
    gradient_accumulation_steps = None
    clipnorm = None
    _strategy = None


def dataset():
    mesh = dtensor.create_mesh([("batch", 1)], devices=["CPU:0"])
    return dtensor.DTensorDataset(
        tf.data.Dataset.range(4),
        mesh=mesh,
        global_batch_size=2,
        layouts=dtensor.Layout(["batch"], mesh),
        batch_dim="batch",
    )


MADE = {
    "TensorFlowTrainer": lambda: keras.Sequential([keras.layers.Dense(1)]),
    "BaseTrainer": lambda: keras.Sequential([keras.layers.Dense(1)]),
    "BaseOptimizer": keras.optimizers.SGD,
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD()
    ),
    "DTensorDataset": dataset,
}
NUMBERS = {
    ("scatter", "indices"): np.zeros([2, 1], np.int32),
    ("scatter", "values"): np.ones([2], np.float32),
    ("scatter", "shape"): (3,),
    ("copy_to_mesh", "layout"): dtensor.Layout.replicated(
        dtensor.create_mesh([("x", 1)], devices=["CPU:0"]), 1
    ),
}


TOO_LATE = """
import warnings
import numpy as np, tensorflow as tf
import tf_layoutmap as tlm

warnings.simplefilter("error")
dtensor = tf.experimental.dtensor
mesh = dtensor.create_mesh([("x", 1)], devices=["CPU:0"])
layout = dtensor.Layout.replicated(mesh, 1)
if {is_late}:
    dtensor.pack([np.zeros(1)], layout)
tlm.LayoutMap(mesh=mesh)
assert [patch for patch in tlm.process.patches() if patch.group == "mesh"]
"""


@pytest.mark.parametrize("is_late", [False, True])
def test_using_dtensor_before_this_package_warns(is_late):
    done = forked_process.run_code(
        TOO_LATE.format(is_late=is_late), cwd=ROOT, check=False
    )
    assert ("was used in this process before" in done.stderr) == is_late
    assert (done.returncode != 0) == is_late, done.stderr


IMPORT_ALL = """
import keras, tensorflow as tf
before = (tf.raw_ops.ConcatV2, keras.layers.Layer.__call__,
          keras.optimizers.Optimizer.build)
import tf_layoutmap as tlm
import tf_keras

def touch(package):
    for name in package.__all__:
        value = getattr(package, name)
        if hasattr(value, "__all__"):
            touch(value)

touch(tlm)
after = (tf.raw_ops.ConcatV2, keras.layers.Layer.__call__,
         keras.optimizers.Optimizer.build)
assert before == after, (before, after)
from tf_layoutmap import process_report
assert not process_report.replaced_names(), process_report.replaced_names()
assert tlm.process.patches() == ()
layer = tlm.layers.ShardedEmbedding(10, 2, num_shards=2)
tlm.layers.tf_keras.ShardedEmbedding(10, 2, num_shards=2)
print(sorted({patch.group for patch in tlm.process.patches()}))
"""


def test_importing_every_public_name_installs_no_patches():
    done = forked_process.run_code(IMPORT_ALL, cwd=ROOT)
    # Creating a layer without building it also installs no patches.
    assert done.stdout.strip() == "[]"


def test_a_patch_is_reported_with_its_reason():
    tlm.layout.to_mesh(
        [1.0],
        dtensor.Layout.replicated(
            dtensor.create_mesh([("x", 1)], devices=["CPU:0"]), 1
        ),
    )
    [patch] = [
        patch
        for patch in tlm.process.patches()
        if patch.name.endswith("raw_ops.ConcatV2")
    ]
    assert patch.group == "mesh"
    assert patch.replacement == "tf_layoutmap.layout.ops.corrections.concat"
