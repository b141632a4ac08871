"""Support for Keras 3 models on a mesh.

Start with `context` (one layout map in use), `variable` (weights on a mesh) and
`step` (the step that `fit`, `evaluate` and `predict` run).
"""
