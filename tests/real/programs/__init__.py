"""Short programs of the kinds that tutorials have, each trained a few steps.

Every function makes its own data and models, as a program of its own would,
and knows nothing of a mesh. It returns its losses, and the models whose
weights are to be divided.
"""

from tests.real.program import ProgramCase
from tests.real.programs import (
    generative,
    images,
    series,
    shapes,
    similarity,
    tables,
    text,
)

MODULES = [generative, images, series, shapes, similarity, tables, text]

# Under the scope instead of after `set_distribution`.
SCOPED = {"vae", "wgan_gp"}

CASES = {program.__name__: ProgramCase(program,
                                       scope=program.__name__ in SCOPED)
         for module in MODULES for program in module.PROGRAMS}
