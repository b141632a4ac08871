"""A TensorFlow that moved a private name is refused with the remedy."""

import pytest

from tf_layoutmap._core import tf_private


@pytest.mark.parametrize(
    "module, name",
    [
        ("framework.no_such_module", "Anything"),
        ("framework.composite_tensor", "NoSuchName"),
    ],
)
def test_a_missing_name_is_an_import_error_that_names_versions(module, name):
    with pytest.raises(ImportError) as error:
        tf_private._private(module, name)
    sentence = str(error.value)
    assert f"tensorflow.python.{module}.{name}" in sentence
    assert "pip install" in sentence
    for version in (tf_private.SUPPORTED_VERSION,):
        assert f"{version}.*" in sentence


def test_nothing_is_being_saved_outside_of_a_save():
    assert not tf_private.in_save_context()
