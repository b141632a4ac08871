"""Checks that the tests of `make test` detect mistakes in the sources.

Run all mutations, or only mutations whose names contain `ps/` or `stock`:

    .venv/bin/python tools/mutations.py
    .venv/bin/python tools/mutations.py ps/ stock

The program copies the package and its tests to a temporary folder. A mutation
replaces one piece of text in one source file. For each mutation, the program
changes the file, runs a few tests without the cases that are marked
`exhaustive`, and restores the file. The mutation is "killed" if a test fails.
If no test fails, the mutation has "survived", and a new test is needed to
detect it. Each selection of tests must first pass without a mutation.

Mutations of C++ code are in files below `cc/core/`. Bazel runs their tests,
which do not require TensorFlow.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
COPIED = (
    "tf_layoutmap",
    "tests",
    "tools",
    "benchmarks",
    "examples",
    "docs",
    "cc",
    "third_party",
)
COPIED_FILES = (
    "pytest.ini",
    "BUILD",
    "WORKSPACE",
    "MODULE.bazel",
    ".bazelrc",
)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mistake in the sources that tests must detect.

    Attributes:
      kind: Description of the mistake.
      file: Path below `tf_layoutmap/`, or a path of a C++ file.
      old: Text to replace, which occurs once in the file.
      new: Text that replaces `old`.
      tests: Arguments of pytest that select the tests to run; for a C++ file,
        targets of Bazel.
    """

    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.file}: {self.kind}"

    @property
    def path(self) -> str:
        """Path below the root of the project."""
        return self.file if self.is_native else f"tf_layoutmap/{self.file}"

    @property
    def is_native(self) -> bool:
        return self.file.startswith("cc/")


MUTATIONS = [
    Mutation(
        "added steps: each shard of a vocabulary counts all steps",
        "vocabulary/sharded_numbers.py",
        "values[[STEP, KIND]] = by_shard[:, [STEP, KIND]].max(0)",
        "values[[STEP, KIND]] = by_shard[:, [STEP, KIND]].sum(0)",
        ("tests/vocabulary/test_sharded_numbers.py",),
    ),
    Mutation(
        "wrong replica: ids of the first replica are used for all replicas",
        "embedding/tpu_program.py",
        "return op.inputs[replica]",
        "return op.inputs[0]",
        ("tests/embedding/tpu/test_host_engine.py", "-k", "bitwise"),
    ),
    Mutation(
        "lost overlap: the next lookup beside a TPU is not prefetched",
        "embedding/host/tpu_backend.py",
        "self._host_engine.prefetch(replica)",
        "del replica",
        ("tests/embedding/tpu/test_host_engine.py", "-k", "does_not_wait"),
    ),
    Mutation(
        "lost report: a server has evicted a single key",
        "embedding/servers/evicted_reports.py",
        "                    if size:\n",
        "                    if size > 1:\n",
        ("tests/embedding/servers/test_evicted_reports.py",),
    ),
    Mutation(
        "wrong gate: a device selects the input of another gate",
        "layout/ops/gates.py",
        "(shard * columns + start) // units % len(xs)",
        "(columns + start) // units % len(xs)",
        ("tests/layout/ops/test_gates.py", "-k", "products"),
    ),
    Mutation(
        "off by one: a row behind the last one is accepted",
        "partition.py",
        "outside = (rows < 0) | (rows >= self.num_rows)",
        "outside = (rows < 0) | (rows > self.num_rows)",
        ("tests/partition",),
    ),
    Mutation(
        "swapped operands: the rows of a shard of placement mod",
        "sharded/gradient.py",
        "local_rows * partition.num_shards + number",
        "local_rows + partition.num_shards * number",
        ("tests/sharded/test_writing.py", "-k", "gradient"),
    ),
    Mutation(
        "swapped axis: gradients of columns are concatenated as rows",
        "sharded/gradient.py",
        "tf.concat(gradients, axis=shards.axis)",
        "tf.concat(gradients, axis=0)",
        ("tests/sharded/test_writing.py", "-k", "gradient"),
    ),
    Mutation(
        "wrong dtype: the shape of a gradient is int64",
        "sharded/gradient.py",
        "tf.int32 if max(shape) <= tf.int32.max else tf.int64",
        "tf.int64",
        ("tests/sharded/test_transforms.py", "-k", "branches"),
    ),
    Mutation(
        "wrong side: an id at a boundary belongs to the previous shard",
        "sharded/routing/parts.py",
        'tf.reshape(ids, [-1]), side="right"',
        'tf.reshape(ids, [-1]), side="left"',
        ("tests/sharded/routing/test_routing.py",),
    ),
    Mutation(
        "missing check: a negative id under XLA",
        "sharded/routing/checks.py",
        "wrong = (known < 0) | (known >= size)",
        "wrong = known >= size",
        ("tests/sharded/test_defects.py", "-k", "xla_with_integer"),
    ),
    Mutation(
        "wrong combiner: the divisor of sqrtn",
        "embedding/stock_lookup.py",
        "root = tf.sqrt(tf.where(is_zero, tf.ones_like(total), total))",
        "root = total",
        ("tests/embedding/test_serving.py",),
    ),
    Mutation(
        "off by one: an id behind the longest sequence is kept",
        "embedding/stock_lookup.py",
        "positions < feature.max_sequence_length",
        "positions <= feature.max_sequence_length",
        ("tests/embedding/test_serving.py",),
    ),
    Mutation(
        "swapped axis: sizes of packed features are added over samples",
        "embedding/packing.py",
        "tf.cumsum(sizes, axis=1)",
        "tf.cumsum(sizes, axis=0)",
        ("tests/embedding/test_packing.py",),
    ),
    Mutation(
        "wrong replica: the first replica counts as the last one",
        "embedding/replicas.py",
        "return replica % self.num_local == self.num_local - 1",
        "return replica % self.num_local == 0",
        ("tests/embedding/test_replicas.py",),
    ),
    Mutation(
        "dropped slot: a missing slot variable is not noticed",
        "vocabulary/conversion.py",
        "if slots - values.keys():",
        "if found.keys() - slots:",
        ("tests/vocabulary/test_conversion.py",),
    ),
    Mutation(
        "missing sync: the files of a folder are not synchronized",
        "_core/files.py",
        "            sync(os.path.join(parent, name))\n        sync(parent)",
        "            pass\n        sync(parent)",
        ("tests/files",),
    ),
    Mutation(
        "off by one: gradients are applied one step too late",
        "layers/keras3/row_optimizer.py",
        "(counter.value + 1) % steps, 0",
        "counter.value % steps, 0",
        ("tests/layers/keras3/test_fit.py", "-k", "accumulated"),
    ),
    Mutation(
        "wrong offset: random rows on a server without this package's ops",
        "_core/random_tensors.py",
        "divmod(start[0] * row_size, group_size)",
        "divmod(start[0], group_size)",
        ("tests/test_initial_values.py", "-k", "counters"),
    ),
    Mutation(
        "wrong offset: random rows of a shard",
        "sharded/initial_value.py",
        "            start[axis] = partition.offsets[shard]\n",
        "",
        ("tests/test_initial_values.py", "-k", "shards and TruncatedNormal"),
    ),
    Mutation(
        "wrong offset: random values of a shard on a mesh",
        "layout/keras3/initial_values.py",
        "start = [slice_.start for slice_ in shard.slices]",
        "start = [0 for slice_ in shard.slices]",
        ("tests/test_initial_values.py", "-k", "mesh and GlorotNormal"),
    ),
    Mutation(
        "wrong side: the owner of a row in an exported layer",
        "layers/base/tables.py",
        'flat_ids, side="right"',
        'flat_ids, side="left"',
        ("tests/layers/keras3/test_saving.py", "-k", "exported"),
    ),
    Mutation(
        "missing check: a strict map accepts two patterns",
        "layout/key_matching.py",
        "    if match.shadowed and match.pattern != match.key:\n"
        '        patterns = ", ".join',
        '    if False:\n        patterns = ", ".join',
        (
            "tests/layout/test_key_matching.py",
            "tests/layout/test_layout_map.py",
        ),
    ),
    Mutation(
        "wrong order: the last pattern that matches is taken",
        "layout/key_matching.py",
        "fitting[0] if exact is None",
        "fitting[-1] if exact is None",
        ("tests/layout/test_key_matching.py",),
    ),
    Mutation(
        "missing check: a dimension that the mesh does not divide",
        "layout/mesh/shard_shapes.py",
        "if size % parts:",
        "if size < parts:",
        ("tests/layout/mesh/test_shard_shapes.py",),
    ),
    Mutation(
        "wrong end: a slice that ends before the first element",
        "layout/ops/strided_slices.py",
        "None if end < 0 else end, step",
        "end, step",
        ("tests/layout/ops/test_slice_parts.py",),
    ),
    Mutation(
        "missing rule: operands with several summed labels",
        "layout/ops/einsum_axes.py",
        "return len(_summed(equation)) > 1",
        "return len(_summed(equation)) > 2",
        ("tests/layout/ops/test_corrections.py", "-k", "sum"),
    ),
    Mutation(
        "stale cache: copies of a tensor ignore the mesh",
        "layout/replication/captured_tensors.py",
        "    if mesh not in copies:",
        "    if not copies:",
        ("tests/layout/replication/test_captured_tensors.py",),
    ),
    Mutation(
        "wrong sign: Keras counts negative ids from the end",
        "layout/keras3/embedding_rows.py",
        "ids + tf.cast(weight.shape[0], ids.dtype)",
        "ids - tf.cast(weight.shape[0], ids.dtype)",
        ("tests/layout/keras3/test_embedding_rows.py",),
    ),
    Mutation(
        "wrong rows: a device looks up the rows of other devices",
        "layout/keras3/sharded_rows.py",
        "expand_dims(ids // size, axis)",
        "expand_dims(ids * 0 // size, axis)",
        ("tests/layout/keras3/test_sharded_rows.py", "-k", "match_tensorflow"),
    ),
    Mutation(
        "missing check: an id outside of a sharded table returns a row",
        "layout/keras3/sharded_rows.py",
        "tf.where(is_valid, tf.math.floormod(ids, size), ids)",
        "tf.math.floormod(ids, size)",
        ("tests/layout/keras3/test_sharded_rows.py", "-k", "out_of_range"),
    ),
    Mutation(
        "missing check: weights that one process assigned",
        "layout/processes/compare.py",
        'other.get("times_set") != first.get("times_set")',
        "False",
        ("tests/layout/processes/test_compare.py",),
    ),
    Mutation(
        "wrong set: closures that some servers applied count as done",
        "ps/rounds.py",
        "set.intersection(*applied), set.union(*applied)",
        "set.union(*applied), set.union(*applied)",
        ("tests/ps/rounds/test_rounds.py",),
    ),
    Mutation(
        "off by one: a program restarts once more",
        "ps/restarts.py",
        "if before >= _MAX_RESTARTS:",
        "if before > _MAX_RESTARTS:",
        ("tf_layoutmap/ps/restarts.py",),
    ),
    Mutation(
        "missing check: a checkpoint without its state is chosen",
        "ps/checkpoints.py",
        "if self._is_complete(entry[2])]",
        "]",
        ("tests/ps/guard/test_checkpoint_folders.py",),
    ),
    Mutation(
        "wrong order: on other file systems, the file that readers require is "
        "removed after other files",
        "deltas/merging.py",
        "storage.remove_tree(path, chain.META_FILE)",
        "storage.remove_tree(path)",
        ("tests/files/test_faulty_store.py",),
    ),
    Mutation(
        "lost rows: an export by key overwrites the files of the last export",
        "vocabulary/row_files.py",
        "max(old.values(), default=-1) + 1",
        "0",
        ("tests/files/test_faulty_store.py",),
    ),
    Mutation(
        "missing check: a program writes to a checkpoint folder of another one",
        "ps/folder_locks.py",
        "if self._token not in owner:",
        "if not owner:",
        ("tests/files/test_remote_paths.py",),
    ),
    # The following Python functions have the same results as C++ code.
    Mutation(
        "wrong shards: the last shards have one more row",
        "partition.py",
        "base + (shard < extra)",
        "base + (shard >= num_shards - extra)",
        ("tests/partition",),
    ),
    Mutation(
        "wrong modulus: buckets do not wrap in their segment",
        "vocabulary/stock_find.py",
        "tf.math.floormod(inside, segment)",
        "inside",
        ("tests/embedding/host/test_open_table_copies.py", "-k", "stock"),
    ),
    Mutation(
        "off by one: the number of segments",
        "vocabulary/bucket_layout.py",
        "2 * segments * MAX_PROBES <= num_buckets",
        "2 * segments * MAX_PROBES < num_buckets",
        ("tests/vocabulary/test_open_vocabulary.py", "-k", "segment"),
    ),
    Mutation(
        "wrong shift: the buckets of keys on servers",
        "vocabulary/bucket_layout.py",
        "(27, 0x94D049BB133111EB)",
        "(26, 0x94D049BB133111EB)",
        ("tests/vocabulary/test_open_vocabulary.py", "-k", "buckets_of_keys"),
    ),
    Mutation(
        "wrong sign: the last steps of imported keys",
        "vocabulary/key_rows.py",
        "+ (step - block.step)",
        "- (step - block.step)",
        ("tests/vocabulary/test_imported_rows.py", "-k", "ages"),
    ),
    Mutation(
        "swapped nibbles: codes of int4",
        "deltas/served/packing.py",
        "[codes & 15, codes >> 4]",
        "[codes >> 4, codes & 15]",
        ("tests/serving/test_packing.py", "-k", "not graph"),
    ),
    Mutation(
        "wrong rounding: codes of int8",
        "deltas/served/packing.py",
        "np.rint(",
        "np.floor(",
        ("tests/serving/test_packing.py", "-k", "not graph"),
    ),
    Mutation(
        "wrong rounding: quantized rows",
        "embedding/stock_lookup.py",
        "(clipped - lower) / quantum + 0.5",
        "(clipped - lower) / quantum",
        ("tests/embedding/configs/test_quantization.py",),
    ),
    Mutation(
        "lost layout: a consumer shards the dimension of a concatenation",
        "layout/ops/corrections.py",
        """        return tracing.with_layout_of_producer(
            original(values, axis, name=name)
        )""",
        "        return original(values, axis, name=name)",
        ("tests/layout/ops/test_relayouts.py", "-k", "order"),
    ),
    Mutation(
        "wrong layout: the samples of experts are in the first dimension",
        "layout/ops/einsum_axes.py",
        "(label for label in other if label not in weight)",
        "iter(other)",
        ("tests/layout/keras3/test_transformers.py", "-k", "experts"),
    ),
    Mutation(
        "missing exclusion: a padded dimension stays sharded",
        "layout/ops/independent_dims.py",
        "if not paddings[i].any()",
        "if not paddings[i].all()",
        ("tests/layout/ops/test_independent_dims.py", "-k", "padding"),
    ),
    Mutation(
        "off by one: one delta less is kept",
        "deltas/merging.py",
        "delta.meta.sequence <= last - keep]",
        "delta.meta.sequence <= last - keep + 1]",
        ("tests/deltas/test_merging.py",),
    ),
    Mutation(
        "lost change: a weight that the last delta does not change",
        "deltas/merging.py",
        'described["is_changed"] or is_changed,',
        'described["is_changed"],',
        ("tests/deltas/served/test_weights.py",),
    ),
    Mutation(
        "lost offset: steps of written keys do not count from their block",
        "vocabulary/key_rows.py",
        "np.asarray(last_steps, np.int64) + (step - block.step), 0",
        "np.asarray(last_steps, np.int64), 0",
        ("tests/vocabulary",),
    ),
    Mutation(
        "lost row: the first line of a file of word vectors",
        "vocabulary/vector_files.py",
        "if number == 1 and dim > 1 and _is_head(line):",
        "if number == 1 and dim > 0 and _is_head(line):",
        ("tests/vocabulary/test_vector_files.py",),
    ),
    Mutation(
        "missing check: two coordinators use the same servers",
        "ps/claims.py",
        'if owner.get("token") != _TOKEN and _runs(owner):',
        "if False:",
        ("tests/ps/guard",),
    ),
    Mutation(
        "off by one: a step in flight may lose its oldest row",
        "cc/core/vocabulary/evict_keys.cc",
        "return last_step >= step.oldest_in_flight ||",
        "return last_step > step.oldest_in_flight ||",
        ("//cc/core:vocabulary/admit_keys_test",),
    ),
    Mutation(
        "repeated key: an evicted key is reported twice",
        "cc/core/vocabulary/evict_keys.cc",
        """if (bucket.keys[lane] == kEmptyKey) return true;
      Free(bucket, lane);""",
        "Free(bucket, lane);",
        ("//cc/core:vocabulary/admit_keys_test",),
    ),
    Mutation(
        "swapped: float16 rows of new keys are written as bfloat16",
        "cc/core/vocabulary/first_rows.cc",
        "first.row_type == RowType::kBfloat16 ? ToBfloat16 : ToFloat16",
        "first.row_type == RowType::kBfloat16 ? ToFloat16 : ToBfloat16",
        ("//cc/core:vocabulary/first_rows_test",),
    ),
    Mutation(
        "lost maximum: a written key gets an older step",
        "cc/core/vocabulary/write_keys.cc",
        "std::max(bucket.last_step[lane], written.last_steps[i])",
        "written.last_steps[i]",
        ("//cc/core:vocabulary/write_keys_test",),
    ),
    Mutation(
        "wrong weight: an unused key is never sampled",
        "cc/core/vocabulary/sample_keys.cc",
        "block.keys[lane] == kEmptyKey ? 0 : std::max(block.count[lane], 1)",
        "block.keys[lane] == kEmptyKey ? 0 : block.count[lane]",
        ("//cc/core:vocabulary/sample_keys_test",),
    ),
    Mutation(
        "off by one: a closure outside of the window is accepted",
        "cc/core/servers/applied_closures.cc",
        "if (token.number >= first + kWindow) {",
        "if (token.number > first + kWindow) {",
        ("//cc/core:servers/applied_closures_test",),
    ),
    Mutation(
        "lost state: a new epoch keeps the closures of the old one",
        "cc/core/servers/applied_closures.cc",
        """    std::fill(state_.begin() + kNumCounts, state_.end(), 0);
""",
        "",
        ("//cc/core:servers/applied_closures_test",),
    ),
    Mutation(
        "wrong rounding: bfloat16 values are truncated",
        "cc/core/servers/wire.cc",
        "const auto sum = static_cast<uint32_t>(magnitude) + 0x7fff + is_odd;",
        "const auto sum = static_cast<uint32_t>(magnitude) + 0 * is_odd;",
        ("//cc/core:servers/wire_test",),
    ),
    Mutation(
        "wrong count: a key that is used twice counts once",
        "cc/core/served_keys/key_pieces.cc",
        "uses.insert(uses.end(), requested.times[i], requested.keys[i]);",
        "uses.insert(uses.end(), 1, requested.keys[i]);",
        ("//cc/core:served_keys/key_pieces_test",),
    ),
    Mutation(
        "lost check: a lookup may skip earlier lookups of its step",
        "cc/core/served_keys/fetched_steps.cc",
        "if (token.call == num_calls) return Status();",
        "if (token.call >= num_calls) return Status();",
        ("//cc/core:served_keys/fetched_steps_test",),
    ),
    Mutation(
        "wrong shard: a row at the start of a shard goes to the one before",
        "cc/core/exchange/contributions.cc",
        "std::upper_bound(offsets.begin(), offsets.end() - 1, row)",
        "std::lower_bound(offsets.begin(), offsets.end() - 1, row)",
        ("//cc/core:exchange/contributions_test",),
    ),
    Mutation(
        "wrong head: the gains of a message are not announced",
        "cc/core/exchange/contributions.cc",
        "(part.gains.empty() ? 0u : kHasGains)",
        "0u",
        ("//cc/core:exchange/contributions_test",),
    ),
    Mutation(
        "wrong count: a repeated key is requested with its first use only",
        "cc/core/exchange/key_requests.cc",
        "++found->times[first];",
        "",
        ("//cc/core:exchange/key_requests_test",),
    ),
]


def run(mutation: Mutation, folder: pathlib.Path, seconds: int) -> int:
    """Runs the tests of a mutation.

    Returns:
      The exit code of pytest, 1 if a native test fails, or 124 if `seconds`
      have passed.
    """
    if mutation.is_native:
        bazel = shutil.which("bazel") or shutil.which("bazelisk") or "bazel"
        command = [bazel, "test", *mutation.tests]
    else:
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        command = [*pytest, "-m", "not exhaustive", "-x", "-q", *mutation.tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHON_BIN_PATH": sys.executable,
    }
    with open(folder / "log.txt", "w") as log:
        try:
            code = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return 124
    # Bazel ends with 3 if a test fails, and with 1 if a build fails.
    return {3: 1, 1: 2}.get(code, code) if mutation.is_native else code


def outcome_of(
    mutation: Mutation, folder: pathlib.Path, seconds: int, passing: dict
) -> str:
    """Returns "killed", "survived", or the reason for a missing result."""
    path = folder / mutation.path
    source = path.read_text()
    if source.count(mutation.old) != 1:
        return f"the text occurs {source.count(mutation.old)} times"
    if mutation.tests not in passing:
        passing[mutation.tests] = run(mutation, folder, seconds)
    if passing[mutation.tests] != 0:
        return f"tests end with {passing[mutation.tests]} without it"
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        code = run(mutation, folder, seconds)
    finally:
        path.write_text(source)
    # Other exit codes mean that the mutation itself is wrong, for example that
    # the changed file cannot be imported or compiled.
    known = {0: "survived", 1: "killed", 124: "killed (deadline)"}
    return known.get(code, f"tests end with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        help="run mutations whose names contain one of these",
    )
    parser.add_argument("--seconds", type=int, default=300)
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not options.names
        or any(part in mutation.name for part in options.names)
    ]
    outcomes = []
    passing: dict[tuple[str, ...], int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for name in COPIED:
            shutil.copytree(
                ROOT / name,
                folder / name,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        for name in COPIED_FILES:
            shutil.copy(ROOT / name, folder)
        for mutation in chosen:
            start = time.monotonic()
            outcomes.append(
                outcome_of(mutation, folder, options.seconds, passing)
            )
            seconds = time.monotonic() - start
            print(
                f"{outcomes[-1]:10} {seconds:4.0f} s  {mutation.name}",
                flush=True,
            )
    killed = sum(outcome.startswith("killed") for outcome in outcomes)
    print(f"{killed} of {len(chosen)} mutations were killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
