"""Code that the layers of both Keras versions share.

The modules `sharded_embedding` and `tpu_embedding` contain the base classes;
read these two modules first. The packages `layers.keras3` and `layers.tf_keras`
each add the code for one Keras version.
"""
