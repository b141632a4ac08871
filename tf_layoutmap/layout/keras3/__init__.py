"""Support for Keras 3 models on a mesh.

Start with these modules:

* `context`: the layers and variables that use one layout map.
* `variable`: weights on a mesh.
* `step`: the step that `fit`, `evaluate` and `predict` run.
"""
