"""Files and folders that are replaced completely or not at all.

A writer writes into a folder beside its target (`staging`), waits until the
disk has it, and renames (`replacing`). A process that is killed leaves the
target as it was or complete, and a folder that the next writer of the target
removes. `replacing` is where to start.

Paths are those of TensorFlow's file systems. Without a scheme, or with
`file://`, they are local. On other file systems a rename may not be atomic,
nothing is synced, and leftovers are not removed.
"""
