"""Names in the lists of TensorFlow, Keras and NumPy pages exist."""

import importlib.util
import pathlib
import zlib

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def inventories():
    path = DOCS / "_ext" / "inventories.py"
    spec = importlib.util.spec_from_file_location("inventories", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_listed_names_exist_and_are_sorted(inventories):
    for package in inventories.ADDRESSES:
        names = list(inventories.read(package))
        assert names == sorted(names)
        for name in names:
            assert inventories.entries(name), name


def test_types_of_signatures_are_in_the_inventory(inventories):
    data = inventories.inventory("tensorflow")
    lines = zlib.decompress(data.split(b"zlib.\n", 1)[1]).decode()
    for name in ("tf.Tensor", "tensorflow.python.framework.tensor.Tensor"):
        assert f"{name} py:class 1 tf/Tensor tf.Tensor\n" in lines


def test_usual_short_names_are_found(inventories):
    assert inventories.listed_name("np.dtype") == "numpy.dtype"
    assert (
        inventories.listed_name("dtensor.Mesh")
        == "tf.experimental.dtensor.Mesh"
    )
    assert inventories.listed_name("keras.layers.NoSuchLayer") is None
    assert inventories.listed_name("path.name") is None
