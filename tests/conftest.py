"""What all tests share. Cheap on purpose: TensorFlow is not imported here."""

import os

import hypothesis

# TensorFlow's start-up notes would bury the one line that matters.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Deterministic by default: the same examples in every run and on every
# machine. TF_LAYOUTMAP_EXPLORE=1 draws new ones, and more of them. No
# deadline, because the first call of an op pays for tracing.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None,
    max_examples=50)
hypothesis.settings.register_profile(
    "explore", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(
    "explore" if os.environ.get("TF_LAYOUTMAP_EXPLORE") == "1" else "fixed")
