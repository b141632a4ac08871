"""The table of all replaced names of TensorFlow, Keras and tf_keras.

`rows.py` defines a row, the `*_rows.py` modules contain the table, and
`engine.py` installs and uninstalls groups of rows. Importing this package
replaces no name.
"""
