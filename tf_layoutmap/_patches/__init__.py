"""The patch table, which lists all replaced names of other packages.

The package replaces functions and methods of TensorFlow, Keras and tf_keras.
`rows.py` defines an entry of the table, and the `*_rows.py` modules contain the
entries. `engine.py` installs and uninstalls groups of entries. Importing this
package does not replace any name.
"""
