"""Compiler flags of the native code."""

# The option -ffp-contract=off disables fused multiply-add. With fused
# multiply-add, AVX2 code and baseline code would compute rows that differ in
# the last bit, and a run that is resumed on another machine would diverge. The
# options -fno-math-errno and -fno-trapping-math do not change results. With
# these options, the compiler can vectorize loops that contain square roots and
# comparisons.
COPTS = [
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-sign-compare",
    # Ignoring a Status is a compilation error (cc/core/base/status.h).
    "-Werror=unused-result",
] + select({
    # With -O1, sanitizers check more memory accesses, because the optimizer
    # merges fewer accesses. The compilation also takes half the time.
    "//cc:instrumented": ["-O1"],
    "//conditions:default": ["-O3"],
})

# Flags of files that include TensorFlow's headers. These files are never
# instrumented, and assert is always disabled. Instrumentation or assert would
# change the layout of classes in absl and TensorFlow, which must match the
# installed libraries.
TF_COPTS = COPTS + select({
    "//cc:instrumented": [
        "-fno-sanitize=all",
        "-DNDEBUG",
    ],
    "//conditions:default": [],
})

# Linker flags of the shared libraries in the package. The option -s removes
# symbols that are not needed at run time, which reduces the size by a third.
# Use --config=asan for debugging.
LIBRARY_LINKOPTS = select({
    "//cc:instrumented": [],
    "//conditions:default": ["-Wl,-s"],
})

# TensorFlow's library is passed to the linker as a file. If it were a
# dependency, Bazel would write a build directory into RUNPATH. RUNPATH is not
# needed, because the process loads TensorFlow's library before the libraries of
# this package.
TF_LIBRARY = "@pip_deps//:libtensorflow_framework.so.2"
TF_LINKOPTS = LIBRARY_LINKOPTS + ["$(location %s)" % TF_LIBRARY]

# Additional compiler flags for each instruction set in cc/core/simd. Do not use
# them for a file that includes TensorFlow, Eigen or templates of the standard
# library. The linker keeps only one copy of each inline function, and a CPU
# might not support the instructions in that copy.
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
    # The code for processors without intrinsics, such as aarch64. Tests compare
    # it with the other instruction sets on each processor.
    "portable": ["-U__SSE2__"],
}
