#include "cc/dtensor/expander_registry.h"

#include <dlfcn.h>

#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {
namespace {

// Signatures in tensorflow/dtensor/mlir/spmd_expander.h:
//
//   static SPMDExpanderRegistry* Global();
//   SPMDExpanderBase* GetPropagateFnForFullOpName(const std::string&);
//   InitOnStartupMarker RegisterPropagateFn(
//       std::string, std::unique_ptr<SPMDExpanderBase>);
//
// In the Itanium ABI, a class with a destructor is passed by value as a pointer
// to it, a unique_ptr is one pointer in memory, and an empty struct is not
// returned in a register. Therefore the code declares plain pointers and does
// not require TensorFlow's class definitions.
using GlobalFn = void* (*)();
using GetFn = void* (*)(void* registry, const std::string& name);
using RegisterFn = void (*)(void* registry, std::string* name, void** expander);

constexpr char kGlobal[] =
    "_ZN10tensorflow7dtensor20SPMDExpanderRegistry6GlobalEv";
constexpr char kGet[] =
    "_ZN10tensorflow7dtensor20SPMDExpanderRegistry27GetPropagateFnForFullOpName"
    "ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
constexpr char kRegister[] =
    "_ZN10tensorflow7dtensor20SPMDExpanderRegistry19RegisterPropagateFnENSt7__"
    "cxx1112basic_stringIcSt11char_traitsIcESaIcEEESt10unique_ptrINS0_16SPMDExp"
    "anderBaseESt14default_deleteIS9_EE";

struct Registry {
  void* registry = nullptr;
  GetFn get = nullptr;
  RegisterFn add = nullptr;
  std::string missing;
};

Registry Find() {
  Registry r;
  auto symbol = [&](const char* name) {
    void* found = dlsym(RTLD_DEFAULT, name);
    if (found == nullptr && r.missing.empty()) r.missing = name;
    return found;
  };
  const auto global = reinterpret_cast<GlobalFn>(symbol(kGlobal));
  r.get = reinterpret_cast<GetFn>(symbol(kGet));
  r.add = reinterpret_cast<RegisterFn>(symbol(kRegister));
  if (r.missing.empty()) r.registry = global();
  return r;
}

// Repeats the search until it succeeds, because TensorFlow may be imported
// later.
const Registry& Get() {
  static Registry registry = Find();
  if (registry.registry == nullptr) registry = Find();
  return registry;
}

// Returns the name of the op in MLIR.
std::string FullName(const std::string& op) { return "tf." + op; }

}  // namespace

Status ExpanderRegistryAvailable() {
  const Registry& r = Get();
  if (r.registry != nullptr) return Status();
  return FailedPrecondition(
      "The TensorFlow in this process must export tf.dtensor's expander "
      "registry. Missing symbol: " +
      r.missing);
}

bool HasExpander(const std::string& name) {
  const Registry& r = Get();
  return r.registry != nullptr && r.get(r.registry, FullName(name)) != nullptr;
}

Status ShareExpander(const std::string& name, const std::string& donor) {
  LM_RETURN_IF_ERROR(ExpanderRegistryAvailable());
  const Registry& r = Get();
  if (HasExpander(name)) {
    return FailedPrecondition("Op '" + name +
                              "' already has an expander in tf.dtensor");
  }
  void* expander = r.get(r.registry, FullName(donor));
  if (expander == nullptr) {
    return FailedPrecondition("Op '" + donor +
                              "' has no expander in this tf.dtensor");
  }
  // The object has two owners. This is safe because the registry is never
  // destroyed.
  std::string full_name = FullName(name);
  r.add(r.registry, &full_name, &expander);
  return Status();
}

}  // namespace layoutmap
