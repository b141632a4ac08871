"""A program that only connects; test_faults.py starts it."""

import tf_layoutmap as tlm

if __name__ == "__main__":
    tlm.ps.connect(timeout_seconds=1)
