"""Backbones of keras-hub whose layout maps are planned (`tlm.plan`)."""

import dataclasses

from tests.real.hub import encoders, images, language, mixed

CASES = {
    name: dataclasses.replace(case, planned=True)
    for module in (language, encoders, images, mixed)
    for name, case in module.CASES.items()
}
