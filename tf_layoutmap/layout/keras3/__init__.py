"""Support for Keras 3 models on a mesh.

Start with `context` (one layout map in use), `variable` (weights on a mesh) and
`step` (what runs behind `fit`, `evaluate` and `predict`).
"""
