"""Compiler flags of the native parts."""

# -ffp-contract=off: with fused multiply-add, rows computed with AVX2 and with
# the baseline differ in the last bit, and a run resumed on another machine
# would drift.
# -fno-math-errno -fno-trapping-math change no result; they let loops with
# square roots and comparisons become vector code.
COPTS = [
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-sign-compare",
    # A Status that nobody looks at (cc/core/base/status.h).
    "-Werror=unused-result",
] + select({
    # Sanitizers see more, and compile in half the time, before the optimizer
    # has merged what they watch.
    "//cc:instrumented": ["-O1"],
    "//conditions:default": ["-O3"],
})

# For files that include TensorFlow's headers: never instrumented, never with
# assert alive. Both change the layout of absl's and TensorFlow's classes, which
# must be that of the installed libraries.
TF_COPTS = COPTS + select({
    "//cc:instrumented": [
        "-fno-sanitize=all",
        "-DNDEBUG",
    ],
    "//conditions:default": [],
})

# For the shared libraries that go into the package. -s: symbols that nobody
# resolves are a third of them; whoever debugs builds --config=asan.
LIBRARY_LINKOPTS = select({
    "//cc:instrumented": [],
    "//conditions:default": ["-Wl,-s"],
})

# A file for the linker and not a dependency, for which Bazel would write a folder
# of the build into the library (RUNPATH). None is needed: TensorFlow's library is
# in the process before ours.
TF_LIBRARY = "@pip_deps//:libtensorflow_framework.so.2"
TF_LINKOPTS = LIBRARY_LINKOPTS + ["$(location %s)" % TF_LIBRARY]

# Extra flags per body of cc/core/simd. Never for a file that includes
# TensorFlow, Eigen or the standard library's templates: the linker keeps one
# copy of each inline function, and it could be one that this CPU cannot run.
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
