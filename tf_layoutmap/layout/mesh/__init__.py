"""Tensors and variables on a DTensor mesh, without Keras.

`device_mesh`, `shard_shapes` and `transfer` place host values on a mesh and
read them back. `tracing` records the mesh of the current trace and fixes the
layouts of tensors in a traced function. `variable` and `atomic_step` define the
variables of a model. Start with `transfer`.
"""
