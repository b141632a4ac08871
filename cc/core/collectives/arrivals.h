// The table in which the devices of a process wait for each other.

#ifndef TF_LAYOUTMAP_CORE_COLLECTIVES_ARRIVALS_H_
#define TF_LAYOUTMAP_CORE_COLLECTIVES_ARRIVALS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace layoutmap {

// Identifies a collective operation among the operations that run at the same
// time.
struct CollectiveKey {
  int32_t group;
  int32_t instance;
  // The loop, and the iteration of the loop, that contains the operation.
  uint64_t frame;
  int64_t iteration;

  bool operator==(const CollectiveKey& other) const {
    return group == other.group && instance == other.instance &&
           frame == other.frame && iteration == other.iteration;
  }
};

// A device that has reached a collective operation. Derived classes contain the
// data of the device.
class Arrival {
 public:
  virtual ~Arrival() = default;

 private:
  friend class ArrivalTable;

  // The table's mutex guards these members.
  bool is_withdrawn_ = false;
  bool is_waiting_ = false;
  CollectiveKey key_ = {};
};

using Arrivals = std::vector<std::shared_ptr<Arrival>>;

// Collects the arrivals of each operation until all devices have arrived. No
// method blocks, except for a mutex that no caller holds for a long time: the
// device that arrives last runs the operation for all devices.
//
// Each arrival is returned by exactly one call. The caller of this call must
// complete the operation of the arrival, successfully or with an error.
class ArrivalTable {
 public:
  enum class Outcome {
    // The device has to wait.
    kWaiting,
    // All devices have arrived. `arrivals` contains them in the order of ranks.
    kComplete,
    // Another device with the same rank already waits, or the other devices
    // have
    // another `num_ranks`. `arrivals` contains all devices that must fail,
    // including this one.
    kConflict,
    // The arrival was withdrawn before this call. `arrivals` contains it.
    kWithdrawn,
    // The table was closed. `arrivals` contains the arrival.
    kClosed,
  };
  struct Result {
    Outcome outcome = Outcome::kWaiting;
    Arrivals arrivals;
  };

  // Adds a device.
  //
  // `rank` is in [0, num_ranks), and `num_ranks` is the same for all devices of
  // an operation.
  Result Arrive(const CollectiveKey& key, int rank, int num_ranks,
                std::shared_ptr<Arrival> arrival);

  // Withdraws a device, because its step was cancelled. The operation cannot be
  // completed any more, so all devices that wait for it are returned. The
  // result is empty if the device does not wait: either the operation is
  // complete, or `Arrive` will return kWithdrawn.
  Arrivals Withdraw(const std::shared_ptr<Arrival>& arrival);

  // Returns all devices that wait. `Arrive` returns kClosed after this call.
  Arrivals Close();

 private:
  struct KeyHash {
    size_t operator()(const CollectiveKey& key) const;
  };
  struct Operation {
    int num_arrived = 0;
    Arrivals arrivals;
  };

  // Appends the arrivals of `operation` to `arrivals`. Requires the mutex.
  static void TakeAll(Operation* operation, Arrivals* arrivals);

  std::mutex mutex_;
  bool is_closed_ = false;
  std::unordered_map<CollectiveKey, Operation, KeyHash> operations_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_COLLECTIVES_ARRIVALS_H_
