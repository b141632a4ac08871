"""Short programs of the kinds that tutorials have, each trained a few steps.

Every function makes its own data and models, as a program of its own would,
and knows nothing of a mesh. It returns its losses, and the models whose
weights are to be divided.
"""

CASES: dict = {}
