"""The parts of the layers of `tlm.layers` that both Keras versions share.

`sharded_embedding` and `tpu_embedding` are the base classes; start there.
`layers.keras3` and `layers.tf_keras` add what is specific to one version.
"""
