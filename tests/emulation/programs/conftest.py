"""Applies the emulation settings of each program in a shared process."""

import pytest

import tf_layoutmap as tlm


@pytest.fixture(autouse=True, scope="module")
def setting_of_this_program(request):
    """Restarts the TPU with the deadline of this program.

    All programs of a process use the same emulated TPU, but with different
    deadlines.
    """
    tlm.emulation.enable(**request.module.SETTING)
    tlm.emulation.initialize_tpu_system()
