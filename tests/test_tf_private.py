"""Missing private names of TensorFlow raise an error with the solution."""

import pytest

from tf_layoutmap._core import tf_private


@pytest.mark.parametrize(
    "module, name",
    [
        ("framework.no_such_module", "Anything"),
        ("framework.composite_tensor", "NoSuchName"),
    ],
)
def test_a_missing_name_raises_with_the_versions(module, name):
    with pytest.raises(ImportError) as error:
        tf_private._private(module, name)
    sentence = str(error.value)
    assert f"tensorflow.python.{module}.{name}" in sentence
    assert "pip install" in sentence
    for version in (tf_private.SUPPORTED_VERSION,):
        assert f"{version}.*" in sentence


def test_in_save_context_is_false_outside_of_a_save():
    assert not tf_private.in_save_context()
