"""Code that the layers of both Keras versions share.

`sharded_embedding` and `tpu_embedding` contain the base classes; start there.
`layers.keras3` and `layers.tf_keras` add the code for one version.
"""
