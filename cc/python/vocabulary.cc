#include "cc/python/vocabulary.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/evict_keys.h"
#include "cc/core/vocabulary/move_keys.h"
#include "cc/core/vocabulary/write_keys.h"

namespace py = pybind11;

namespace layoutmap {
namespace {

// If `status` is an error, raises an exception with the message of the core.
// The type is ValueError for invalid arguments and RuntimeError for failed
// preconditions.
void Check(const Status& status) {
  if (status.ok()) return;
  if (status.code() == Code::kInvalidArgument) {
    throw py::value_error(status.message());
  }
  throw std::runtime_error(status.message());
}

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
Span<const T> View(const Array<T>& array) {
  return {array.data(), static_cast<int64_t>(array.size())};
}

template <typename T>
Array<T> ToArray(const std::vector<T>& values) {
  Array<T> array(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

template <typename Items, typename Get>
Array<int64_t> Column(const Items& items, const Get& get) {
  std::vector<int64_t> values;
  values.reserve(items.size());
  for (const auto& item : items) values.push_back(get(item));
  return ToArray(values);
}

ParallelFor ThreadsFor(int num_threads) {
  return [num_threads](int64_t total, int64_t /*cost*/,
                       const std::function<void(int64_t, int64_t)>& work) {
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
      const int64_t begin = total * t / num_threads;
      const int64_t end = total * (t + 1) / num_threads;
      if (begin < end) threads.emplace_back(work, begin, end);
    }
    for (std::thread& thread : threads) thread.join();
  };
}

// A vocabulary and its state. The state is split into shards of complete
// buckets.
class Vocabulary {
 public:
  Vocabulary(int64_t capacity, const std::string& admission, int32_t min_count,
             double probability, const std::string& evict,
             int32_t half_life_steps, int32_t ttl_steps, bool fails_when_full,
             uint64_t seed, int32_t num_shards, int num_threads)
      : parallel_for_(ThreadsFor(num_threads)) {
    Check(ParseAdmission(admission, &policy_.admission));
    Check(ParseEviction(evict, &policy_.eviction));
    policy_.min_count = min_count;
    policy_.admitted_of_2_32 = AdmittedOf2To32(probability);
    policy_.half_life_steps = half_life_steps;
    policy_.ttl_steps = ttl_steps;
    policy_.fails_when_full = fails_when_full;
    policy_.seed = seed;
    Check(CheckPolicy(policy_));
    int64_t num_buckets;
    Check(BucketLayout::NumBucketsFor(capacity, &num_buckets));
    SetSize(num_buckets, num_shards);
  }

  int64_t num_rows() const { return layout_.num_rows(); }

  py::dict Admit(const Array<int64_t>& keys, int32_t step,
                 int32_t oldest_in_flight, const Array<int64_t>& pinned_rows) {
    Array<int64_t> rows(keys.size());
    AdmittedKeys admitted;
    Check(AdmitKeys(layout_, policy_,
                    {step, oldest_in_flight, View(pinned_rows)}, View(keys),
                    parallel_for_, state_, {rows.mutable_data(), keys.size()},
                    &admitted));
    const auto& new_keys = admitted.new_keys;
    const VocabularyCounts& counts = admitted.counts;
    py::dict found;
    found["rows"] = rows;
    found["new_rows"] =
        Column(new_keys, [](const NewKey& one) { return one.row; });
    found["new_keys"] =
        Column(new_keys, [](const NewKey& one) { return one.key; });
    found["evicted"] =
        Column(new_keys, [](const NewKey& one) { return one.evicted; });
    found["num_lookups"] = counts.num_lookups;
    found["num_known"] = counts.num_known;
    found["num_probes"] = counts.num_probes;
    found["num_admitted"] = counts.num_admitted;
    found["num_rejected"] = counts.num_rejected;
    found["num_full"] = counts.num_full;
    found["num_evicted"] = counts.num_evicted;
    found["num_expired"] = counts.num_expired;
    return found;
  }

  Array<int64_t> Find(const Array<int64_t>& keys) const {
    Array<int64_t> rows(keys.size());
    FindKeys(layout_, ConstKeys(), View(keys), parallel_for_,
             {rows.mutable_data(), keys.size()});
    return rows;
  }

  Array<int64_t> Evict(const Array<int64_t>& keys, int32_t step,
                       int32_t oldest_in_flight,
                       const Array<int64_t>& pinned_rows) {
    std::vector<KeyOfRow> evicted;
    Check(EvictKeys(layout_, {step, oldest_in_flight, View(pinned_rows)},
                    View(keys), state_, &evicted));
    return Column(evicted, [](const KeyOfRow& one) { return one.row; });
  }

  Array<int64_t> EvictOld(int32_t step, int32_t oldest_in_flight) {
    std::vector<KeyOfRow> evicted;
    EvictExpired(layout_, policy_, {step, oldest_in_flight, {}}, state_,
                 &evicted);
    return Column(evicted, [](const KeyOfRow& one) { return one.row; });
  }

  // Writes keys without admission. Returns the row of each key and the new
  // keys.
  py::tuple Write(const Array<int64_t>& keys, const Array<int32_t>& last_steps,
                  const Array<int32_t>& counts, int32_t step) {
    Array<int64_t> rows(keys.size());
    WrittenKeys written;
    Check(WriteKeys(layout_, {View(keys), View(last_steps), View(counts)}, step,
                    state_, {rows.mutable_data(), keys.size()}, &written));
    return py::make_tuple(
        rows,
        Column(written.new_keys, [](const NewKey& one) { return one.key; }),
        written.num_full);
  }

  // Moves the keys to a vocabulary with the capacity `capacity` and
  // `num_shards` shards.
  py::tuple Resize(int64_t capacity, int32_t num_shards, int32_t step) {
    int64_t num_buckets;
    Check(BucketLayout::NumBucketsFor(capacity, &num_buckets));
    std::vector<KeptKey> kept = KeysOfState(layout_, state_);
    SetSize(num_buckets, num_shards);
    std::vector<RowMove> moves;
    Check(PutKeys(layout_, policy_, step, std::move(kept), state_, &moves));
    return py::make_tuple(
        Column(moves, [](const RowMove& one) { return one.from; }),
        Column(moves, [](const RowMove& one) { return one.to; }));
  }

  // Returns the arrays that a checkpoint stores. The arrays are ordered by row,
  // so they do not depend on the number of shards.
  py::dict State() const {
    py::dict state;
    state["keys"] = ToArray(Joined(keys_));
    state["last_step"] = ToArray(Joined(last_step_));
    state["count"] = ToArray(Joined(count_));
    state["sketch"] = ToArray(sketch_);
    state["seen"] = ToArray(seen_);
    return state;
  }

  // Replaces the counts of keys without a row.
  void SetSketch(const Array<uint8_t>& sketch, const Array<int64_t>& seen) {
    if (sketch.size() != static_cast<py::ssize_t>(sketch_.size()) ||
        seen.size() != static_cast<py::ssize_t>(seen_.size())) {
      throw py::value_error(
          "`sketch` must have " + std::to_string(sketch_.size()) +
          " cells and `seen` " + std::to_string(seen_.size()) + " sums");
    }
    std::copy_n(sketch.data(), sketch.size(), sketch_.begin());
    std::copy_n(seen.data(), seen.size(), seen_.begin());
  }

 private:
  static int64_t AdmittedOf2To32(double probability) {
    if (!(probability >= 0 && probability <= 1)) {
      throw py::value_error("`probability` must be in [0, 1]. Received: " +
                            std::to_string(probability));
    }
    return static_cast<int64_t>(probability * 4294967296.0);
  }

  void SetSize(int64_t num_buckets, int32_t num_shards) {
    if (num_shards < 1) {
      throw py::value_error("`num_shards` must be at least 1. Received: " +
                            std::to_string(num_shards));
    }
    std::vector<int64_t> offsets = {0};
    for (int32_t s = 0; s < num_shards; ++s) {
      offsets.push_back(num_buckets * (s + 1) / num_shards);
    }
    Check(BucketLayout::Make(num_buckets, &layout_));
    Check(RowPartition::Make(Placement::kOffsets, offsets, &partition_));
    MakeShards(kEmptyKey, &keys_, &state_.keys);
    MakeShards(0, &last_step_, &state_.last_step);
    MakeShards(0, &count_, &state_.count);
    if (policy_.admission != Admission::kCount) return;
    sketch_.assign(
        2 * SegmentSketch::NumCells(layout_) * layout_.num_segments(), 0);
    seen_.assign(layout_.num_segments(), 0);
    state_.sketch = sketch_;
    state_.seen = seen_;
  }

  template <typename T>
  void MakeShards(T value, std::vector<std::vector<T>>* shards,
                  ShardedView<T>* view) {
    shards->clear();
    *view = ShardedView<T>();
    view->partition = &partition_;
    view->dim = kKeysPerBucket;
    for (int32_t s = 0; s < partition_.num_shards(); ++s) {
      shards->emplace_back(partition_.shard_size(s) * kKeysPerBucket, value);
    }
    for (std::vector<T>& shard : *shards) view->shards.push_back(shard.data());
  }

  template <typename T>
  static std::vector<T> Joined(const std::vector<std::vector<T>>& shards) {
    std::vector<T> joined;
    for (const std::vector<T>& shard : shards) {
      joined.insert(joined.end(), shard.begin(), shard.end());
    }
    return joined;
  }

  ShardedView<const int64_t> ConstKeys() const {
    ShardedView<const int64_t> view;
    view.partition = &partition_;
    view.dim = kKeysPerBucket;
    view.shards.assign(state_.keys.shards.begin(), state_.keys.shards.end());
    return view;
  }

  VocabularyPolicy policy_;
  ParallelFor parallel_for_;
  BucketLayout layout_;
  RowPartition partition_;
  std::vector<std::vector<int64_t>> keys_;
  std::vector<std::vector<int32_t>> last_step_;
  std::vector<std::vector<int32_t>> count_;
  std::vector<uint8_t> sketch_;
  std::vector<int64_t> seen_;
  VocabularyState state_;
};

Array<float> FirstValuesPy(const std::string& kind, float a, float b,
                           uint64_t seed, const Array<int64_t>& keys,
                           int64_t dim) {
  FirstValues first_values;
  Check(ParseFirstValues(kind, &first_values.kind));
  first_values.a = a;
  first_values.b = b;
  first_values.seed = seed;
  if (dim < 0) throw py::value_error("`dim` must be at least 0");
  Array<float> rows(
      {static_cast<py::ssize_t>(keys.size()), static_cast<py::ssize_t>(dim)});
  for (py::ssize_t i = 0; i < keys.size(); ++i) {
    FillFirstValues(first_values, keys.data()[i],
                    {rows.mutable_data() + i * dim, dim});
  }
  return rows;
}

// Creates an empty vocabulary and adds the keys. Values that mark empty lanes
// are skipped.
py::dict PutKeysPy(const Array<int64_t>& keys, const Array<int32_t>& last_step,
                   const Array<int32_t>& count, int32_t step, int64_t capacity,
                   const std::string& evict, int32_t half_life_steps) {
  if (last_step.size() != keys.size() || count.size() != keys.size()) {
    throw py::value_error(
        "`last_step` and `count` must have one value for each key");
  }
  VocabularyPolicy policy;
  Check(ParseEviction(evict, &policy.eviction));
  policy.half_life_steps = half_life_steps;
  Check(CheckPolicy(policy));
  int64_t num_buckets;
  BucketLayout layout;
  Check(BucketLayout::NumBucketsFor(capacity, &num_buckets));
  Check(BucketLayout::Make(num_buckets, &layout));
  RowPartition whole;
  const std::vector<int64_t> offsets = {0, num_buckets};
  Check(RowPartition::Make(Placement::kDiv, offsets, &whole));
  std::vector<int64_t> new_keys(layout.num_rows(), kEmptyKey);
  std::vector<int32_t> new_steps(layout.num_rows(), 0);
  std::vector<int32_t> new_counts(layout.num_rows(), 0);
  VocabularyState state;
  state.keys = {&whole, {new_keys.data()}, kKeysPerBucket};
  state.last_step = {&whole, {new_steps.data()}, kKeysPerBucket};
  state.count = {&whole, {new_counts.data()}, kKeysPerBucket};
  std::vector<KeptKey> kept;
  for (py::ssize_t i = 0; i < keys.size(); ++i) {
    if (keys.data()[i] == kEmptyKey) continue;
    kept.push_back({i, keys.data()[i], last_step.data()[i], count.data()[i]});
  }
  std::vector<RowMove> moves;
  Check(PutKeys(layout, policy, step, std::move(kept), state, &moves));
  py::dict found;
  found["keys"] = ToArray(new_keys);
  found["last_step"] = ToArray(new_steps);
  found["count"] = ToArray(new_counts);
  found["from"] = Column(moves, [](const RowMove& one) { return one.from; });
  found["to"] = Column(moves, [](const RowMove& one) { return one.to; });
  return found;
}

}  // namespace

void DefineVocabulary(py::module_* m) {
  // Objects cannot be copied or moved, because they contain views of their own
  // members.
  py::class_<Vocabulary, std::unique_ptr<Vocabulary>>(
      *m, "Vocabulary", "An open vocabulary with its state.")
      .def(py::init<int64_t, const std::string&, int32_t, double,
                    const std::string&, int32_t, int32_t, bool, uint64_t,
                    int32_t, int>(),
           py::arg("capacity"), py::kw_only(), py::arg("admission") = "all",
           py::arg("min_count") = 1, py::arg("probability") = 1.0,
           py::arg("evict") = "lru", py::arg("half_life_steps") = 0,
           py::arg("ttl_steps") = 0, py::arg("fails_when_full") = false,
           py::arg("seed") = 0, py::arg("num_shards") = 1,
           py::arg("num_threads") = 1)
      .def_property_readonly("num_rows", &Vocabulary::num_rows)
      .def("admit", &Vocabulary::Admit, py::arg("keys").noconvert(),
           py::arg("step"), py::arg("oldest_in_flight"),
           py::arg("pinned_rows").noconvert(),
           "Applies a training step: returns rows of keys and admits new keys.")
      .def("find", &Vocabulary::Find, py::arg("keys").noconvert(),
           "Returns the row of each key, or -1 if it has no row.")
      .def("evict", &Vocabulary::Evict, py::arg("keys").noconvert(),
           py::arg("step"), py::arg("oldest_in_flight"),
           py::arg("pinned_rows").noconvert(), "Returns the freed rows.")
      .def("evict_expired", &Vocabulary::EvictOld, py::arg("step"),
           py::arg("oldest_in_flight"), "Returns the freed rows.")
      .def("write", &Vocabulary::Write, py::arg("keys").noconvert(),
           py::arg("last_steps").noconvert(), py::arg("counts").noconvert(),
           py::arg("step"),
           "Writes keys without admission; returns rows, new keys and the "
           "number of keys without a row.")
      .def("resize", &Vocabulary::Resize, py::arg("capacity"),
           py::arg("num_shards"), py::arg("step"),
           "Returns (from, to): the old and new rows of the keys that fit.")
      .def("set_sketch", &Vocabulary::SetSketch, py::arg("sketch").noconvert(),
           py::arg("seen").noconvert(),
           "Replaces the arrays \"sketch\" and \"seen\" of `state`.")
      .def("state", &Vocabulary::State,
           "Returns all arrays of the state, by row.");
  m->def("put_keys", &PutKeysPy, py::arg("keys").noconvert(),
         py::arg("last_step").noconvert(), py::arg("count").noconvert(),
         py::arg("step"), py::arg("capacity"), py::arg("evict"),
         py::arg("half_life_steps"),
         "Returns keys by row in a vocabulary of another capacity, and moves.");
  m->def("first_values", &FirstValuesPy, py::arg("kind"), py::arg("a"),
         py::arg("b"), py::arg("seed"), py::arg("keys").noconvert(),
         py::arg("dim"), "Returns the initial rows of keys, [num_keys, dim].");
}

}  // namespace layoutmap
