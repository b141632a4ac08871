"""Compiler flags of the native code."""

# -ffp-contract=off: with fused multiply-add, rows computed with AVX2 and with
# the baseline would differ in the last bit, and a run resumed on another
# machine would diverge. -fno-math-errno and -fno-trapping-math do not change
# results; they allow the compiler to vectorize loops with square roots and
# comparisons.
COPTS = [
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-sign-compare",
    # An unchecked Status is an error (cc/core/base/status.h).
    "-Werror=unused-result",
] + select({
    # With -O1, sanitizers see more accesses, because the optimizer has not
    # merged them, and compilation takes half the time.
    "//cc:instrumented": ["-O1"],
    "//conditions:default": ["-O3"],
})

# Flags of files that include TensorFlow's headers. They are never instrumented,
# and assert is always disabled: both would change the layout of absl's and
# TensorFlow's classes, which must match the installed libraries.
TF_COPTS = COPTS + select({
    "//cc:instrumented": [
        "-fno-sanitize=all",
        "-DNDEBUG",
    ],
    "//conditions:default": [],
})

# Flags of the shared libraries in the package. -s removes symbols that are not
# needed at run time, which are a third of the size. Use --config=asan for
# debugging.
LIBRARY_LINKOPTS = select({
    "//cc:instrumented": [],
    "//conditions:default": ["-Wl,-s"],
})

# TensorFlow's library is passed as a file for the linker, not as a dependency,
# because Bazel would write a build directory into RUNPATH for a dependency.
# RUNPATH is not needed: the process has loaded TensorFlow's library before
# ours.
TF_LIBRARY = "@pip_deps//:libtensorflow_framework.so.2"
TF_LINKOPTS = LIBRARY_LINKOPTS + ["$(location %s)" % TF_LIBRARY]

# Additional flags for each instruction set of cc/core/simd. Do not use them for
# a file that includes TensorFlow, Eigen or templates of the standard library:
# the linker keeps one copy of each inline function, and that copy might not run
# on this CPU.
ISA_COPTS = {
    "avx2": [
        "-mavx2",
        "-mfma",
    ],
    "avx512": [
        "-mavx512f",
        "-mavx512dq",
        "-mavx512bw",
        "-mavx512vl",
        "-mfma",
    ],
    "base": [],
}
