"""Public names of the package are imported on first use."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import traceback
import types

import pytest

import tf_layoutmap
from tf_layoutmap._core import lazy, requirements


def test_pure_modules_do_not_import_tensorflow():
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tf_layoutmap, tf_layoutmap.partition\n"
            "assert tf_layoutmap.partitioners.FixedShardsPartitioner(2)(\n"
            "    (4,), 'int8') == [2]\n"
            "assert 'tensorflow' not in sys.modules",
        ],
        check=True,
    )


def test_served_deltas_import_neither_tensorflow_nor_the_writer():
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tf_layoutmap.deltas.served\n"
            "assert 'DeltaWriter' in dir(tf_layoutmap.deltas)\n"
            "assert 'tensorflow' not in sys.modules\n"
            "import tf_layoutmap.deltas.served.served_model\n"
            "assert 'tensorflow' in sys.modules\n"
            "assert 'tf_layoutmap.deltas.writer' not in sys.modules",
        ],
        check=True,
    )


def test_layers_on_one_host_import_no_module_of_other_runtimes():
    """These modules would double the time of importing a layer."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import sys
import keras, numpy as np, tensorflow as tf
import tf_layoutmap as tlm
tpu = tf.tpu.experimental.embedding
words = tpu.TableConfig(4, 2, name="words")
layer = tlm.layers.TPUEmbedding(
    {"word": tpu.FeatureConfig(words)}, tpu.SGD(1.0))
inputs = keras.Input([2], dtype="int64")
rows = tlm.layers.ShardedEmbedding(4, 2, optimizer="sgd")(inputs)
outputs = [keras.layers.Flatten()(rows), layer({"word": inputs})["word"]]
model = keras.Model(inputs, keras.layers.Concatenate()(outputs))
model.compile("sgd", loss="mse")
model.fit(np.array([[0, 1]]), np.zeros([1, 6]), verbose=0)
print(*(name for name in sys.modules if name.startswith("tf_layoutmap.")))
""",
        ],
        check=True,
        text=True,
        capture_output=True,
    )
    modules = done.stdout.split()
    assert "tf_layoutmap.embedding.host.backend" in modules
    for other in (
        "embedding.process_sharded",
        "embedding.host.multi_process",
        "embedding.servers",
        "embedding.tpu",
        "layers.keras3.mesh",
        "layout.keras3.variable",
        "layout.ops",
        "vocabulary.conversion",
    ):
        prefix = f"tf_layoutmap.{other}"
        assert not [
            module
            for module in modules
            if module == prefix or module.startswith(f"{prefix}.")
        ]


def test_every_public_name_exists():
    for name in tf_layoutmap.__all__:
        assert getattr(tf_layoutmap, name) is not None
        assert name in dir(tf_layoutmap)


def test_an_unknown_name_raises_and_lists_the_public_names():
    with pytest.raises(AttributeError, match="'Shard'.*ShardedVariable"):
        tf_layoutmap.Shard  # noqa: B018


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("ShardedVarable", "tf_layoutmap.ShardedVariable"),
        ("sharded_variable", "tf_layoutmap.ShardedVariable"),
        ("TPUEmbeding", "tf_layoutmap.TPUEmbedding"),
        ("layer", "tf_layoutmap.layers"),
        # These typos are swapped letters, a missing letter, and an extra letter
        # in a short name.
        ("exprot", "tf_layoutmap.export"),
        ("pak", "tf_layoutmap.pack"),
        ("packk", "tf_layoutmap.pack"),
        ("layot", "tf_layoutmap.layout"),
        # These names exist in other packages.
        ("ShardedEmbedding", "tf_layoutmap.layers.ShardedEmbedding"),
        ("OpenVocabulary", "tf_layoutmap.vocabulary.OpenVocabulary"),
        ("RowwiseAdagrad", "tf_layoutmap.optimizers.RowwiseAdagrad"),
    ],
)
def test_a_typo_gets_one_suggestion(typo, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(tf_layoutmap, typo)
    assert str(caught.value) == (
        f"Module 'tf_layoutmap' has no attribute {typo!r}. Did you mean "
        f"'{meant}'?"
    )
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.lower().count("did you mean") == 1


def test_a_typo_in_a_subpackage_gets_one_suggestion():
    with pytest.raises(
        AttributeError,
        match=(
            r"'ShardedEmbeding'. Did you mean "
            r"'tf_layoutmap.layers.ShardedEmbedding'\?$"
        ),
    ):
        tf_layoutmap.layers.ShardedEmbeding  # noqa: B018


def test_a_suggestion_imports_neither_tensorflow_nor_keras():
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tf_layoutmap\n"
            "assert not hasattr(tf_layoutmap, 'ShardedEmbeding')\n"
            "assert not {'tensorflow', 'keras'} & set(sys.modules)",
        ],
        check=True,
    )


# Program that prints the error of accessing each public name.
ASK = """
import json, sys, traceback, types

class Hidden:
    # As Python says it: for the first that it cannot find.
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError("No module", name="tensorflow")

if "tensorflow" in sys.argv:
    sys.meta_path.insert(0, Hidden())
# TensorFlow itself asks whether there is a Keras.
for name in {"keras", "tf_keras"} & set(sys.argv):
    sys.modules[name] = None
import tf_layoutmap
said, longest = {}, [0]

def ask(module):
    for name in module.__all__:
        try:
            value = getattr(module, name)
        except Exception as error:
            said[f"{module.__name__}.{name}"] = (
                f"{type(error).__name__}: {error}")
            lines = "".join(traceback.format_exception(error)).splitlines()
            longest[0] = max(longest[0], len(lines))
        else:
            if isinstance(value, types.ModuleType) and (
                    hasattr(value, "__all__")):
                ask(value)

ask(tf_layoutmap)
# What programs import by its full name.
import importlib
for name in ("sharded", "dtensor", "server", "layout", "emulation"):
    try:
        importlib.import_module(f"tf_layoutmap.{name}")
    except Exception as error:
        said[f"tf_layoutmap.{name}"] = f"{type(error).__name__}: {error}"
print(json.dumps([said, longest[0]]))
"""


def errors_without(*packages):
    done = subprocess.run(
        [sys.executable, "-c", ASK, *packages],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said, longest = json.loads(done.stdout)
    # The tracebacks must be short, that is, without the frames of imports
    # inside Keras and this package.
    assert 0 < longest <= 10
    return said


def public_names(module=tf_layoutmap):
    names = set()
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType) and hasattr(value, "__all__"):
            names |= public_names(value)
        names.add(f"{module.__name__}.{name}")
    return names


@pytest.mark.parametrize(
    "packages",
    [("tensorflow",), ("tensorflow", "keras"), ("tensorflow", "tf_keras")],
)
def test_without_tensorflow_each_name_raises_with_the_install_command(packages):
    said = errors_without(*packages)
    for name, sentence in said.items():
        assert sentence.startswith("ImportError: tf_layoutmap"), (
            name,
            sentence,
        )
        assert "which is not installed. Install it: pip install" in sentence
    without = {
        "ShardedVariable",
        "TPUEmbedding",
        "layout_map_scope",
        "dtensor.register_op",
        "layers.ShardedEmbedding",
        "layers.TPUEmbedding",
        "emulation.enable",
        "LayoutMap",
        "distribution.ModelParallel",
        "sharded",
        "server",
    }
    assert {f"tf_layoutmap.{name}" for name in without} <= set(said)
    # Names that do not require TensorFlow still work.
    assert not {name for name in said if "partitioners" in name}


def test_without_keras_only_names_that_require_keras_raise():
    said = errors_without("keras")
    assert "tf_layoutmap.ShardedVariable" not in said
    assert "tf_layoutmap.TPUEmbedding" not in said
    assert "tf_layoutmap.layers.ShardedEmbedding" in said
    assert "tf_layoutmap.layout_map_scope" in said
    for sentence in said.values():
        assert "needs Keras 3, which is not installed" in sentence
        assert 'pip install "keras>=3.12,<3.17"' in sentence
    assert set(said) < public_names()


# The same program with an unsupported TensorFlow version, which must not be
# loaded.
OTHER_VERSION = ASK.replace(
    "import tf_layoutmap\n",
    """
import tensorflow
tensorflow.__version__ = "2.19.1"
import tf_layoutmap
""",
    1,
)


def test_another_tensorflow_version_raises_one_sentence():
    done = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said, longest = json.loads(done.stdout)
    version = requirements.built_for()
    assert {*said.values()} == {
        f"ImportError: This build of tf_layoutmap supports TensorFlow "
        f"{version}.* only. Received: TensorFlow 2.19.1. Install a supported "
        f'version: pip install "tensorflow-cpu=={version}.*" (or tensorflow).'
    }
    assert {
        "tf_layoutmap.ShardedVariable",
        "tf_layoutmap.layers.TPUEmbedding",
        "tf_layoutmap.LayoutMap",
        "tf_layoutmap.server",
    } <= said.keys()
    assert 0 < longest <= 10


@pytest.mark.parametrize(
    "name",
    [
        "",
        "deltas",
        "distribution",
        "dtensor",
        "emulation",
        "layers",
        "layout",
        "planning",
        "ps",
        "vocabulary",
    ],
)
def test_a_public_name_hides_no_module(name):
    """With a hidden module, `tlm.layout.x` would depend on the import order."""
    package = getattr(tf_layoutmap, name) if name else tf_layoutmap
    folder = pathlib.Path(package.__file__).parent
    for public, home in package._HOMES.items():
        if ":" in home:
            assert not (folder / public).exists(), public
            assert not (folder / f"{public}.py").exists(), public


def registered(keras):
    registry = keras.saving.get_custom_objects()
    return {name for name in registry if name.startswith("tf_layoutmap>")}


def test_all_classes_of_saved_models_are_registered_lazily(monkeypatch):
    """A class that only its own module registers is not found in a new process.

    `import tf_layoutmap` passes the table of classes to `register_classes`.
    """
    tables = []
    monkeypatch.setattr(lazy, "register_classes", tables.append)
    spec = importlib.util.find_spec("tf_layoutmap")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    for keras, layers in (
        (pytest.importorskip("keras"), "layers"),
        (pytest.importorskip("tf_keras"), "layers.tf_keras"),
    ):
        module = importlib.import_module(f"tf_layoutmap.{layers}")
        for name in module.__all__:
            getattr(module, name)
        importlib.import_module("tf_layoutmap.layers.keras3.stock_adagrad")
        homes = tables[0][keras.__name__]
        assert {f"tf_layoutmap>{one.split(':')[1]}" for one in homes} == (
            registered(keras)
        )
        for home in homes:
            name, _, kind = home.partition(":")
            assert hasattr(importlib.import_module(name), kind)


@pytest.mark.parametrize("is_imported", [False, True])
def test_the_import_of_keras_registers_classes(
    is_imported, tmp_path, monkeypatch
):
    (tmp_path / "keras_for_test.py").write_text(
        "import types\n"
        "found = {}\n"
        "saving = types.SimpleNamespace(get_custom_objects=lambda: found)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "keras_for_test", raising=False)
    if is_imported:
        importlib.import_module("keras_for_test")
    lazy.register_classes({"keras_for_test": ["tests.test_lazy:Saved"]})
    module = importlib.import_module("keras_for_test")
    assert "exec_module" not in vars(module.__loader__)
    (name,) = module.found
    assert name == "tf_layoutmap>Saved"
    loaded = module.found[name].from_config({"value": 3})
    assert type(loaded).__name__ == "Saved" and loaded.value == 3


class Saved:
    def __init__(self, value):
        self.value = value

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@pytest.mark.parametrize("version", ["keras", "tf_keras"])
def test_keras_loads_a_layer_by_its_lazy_registration(version, tmp_path):
    keras = pytest.importorskip(version)
    layers = tf_layoutmap.layers
    layers = layers if version == "keras" else layers.tf_keras
    model = keras.Sequential(
        [
            keras.Input([2], dtype="int64"),
            layers.ShardedEmbedding(4, 2, optimizer="sgd"),
        ]
    )
    path = str(tmp_path / "model.keras")
    model.save(path)
    kind = layers.ShardedEmbedding
    registry = keras.saving.get_custom_objects()
    name = "tf_layoutmap>ShardedEmbedding"
    registry.pop(name)
    try:
        lazy.register_classes({version: [f"{kind.__module__}:{kind.__name__}"]})
        assert registry[name] is not kind
        assert type(keras.models.load_model(path).layers[-1]) is kind
    finally:
        registry[name] = kind


def test_embedding_suggests_the_sharded_embedding():
    with pytest.raises(AttributeError, match=r"layers.ShardedEmbedding'\?$"):
        tf_layoutmap.layers.Embedding  # noqa: B018
