"""The replaced function that returns the host of a core of a TPU."""

import pytest

from tf_layoutmap.emulation import tpu_answers


@pytest.mark.parametrize("index", [(), (1,)])
def test_the_original_receives_the_arguments_of_the_call(index):
    """In TensorFlow 2.20, the function has no second argument."""

    def original(*args):
        return args

    assert tpu_answers.host_of(original, "TPU:0", *index) == ("TPU:0", *index)
