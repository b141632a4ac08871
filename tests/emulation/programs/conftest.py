"""What several programs in one process need of each other."""

import pytest

import tf_layoutmap as tlm


@pytest.fixture(autouse=True, scope="module")
def setting_of_this_program(request):
    """A TPU as after its start, with the deadline of this program.

    The programs of a process emulate one TPU, but wait for different times.
    """
    tlm.emulation.enable(**request.module.SETTING)
    tlm.emulation.initialize_tpu_system()
