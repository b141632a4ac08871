#include "cc/dtensor/expander_registry.h"

#include <dlfcn.h>

#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {
namespace {

// The header tensorflow/dtensor/mlir/spmd_expander.h declares these functions:
//
//   static SPMDExpanderRegistry* Global();
//   SPMDExpanderBase* GetPropagateFnForFullOpName(const std::string&);
//   InitOnStartupMarker RegisterPropagateFn(
//       std::string, std::unique_ptr<SPMDExpanderBase>);
//
// The code below declares the parameters as plain pointers, so that it does not
// require TensorFlow's class definitions. This is valid in the Itanium ABI for
// three reasons. First, an argument of a class with a destructor is passed as a
// pointer to the object. Second, a unique_ptr is one pointer in memory. Third,
// an empty struct is not returned in a register.
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

// Returns the registry. The function repeats the search in each call until the
// search succeeds, because a program may import TensorFlow later.
const Registry& Get() {
  static Registry registry = Find();
  if (registry.registry == nullptr) registry = Find();
  return registry;
}

// Returns the name that the op has in MLIR.
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
  // After this call, two entries of the registry own the same object. This is
  // safe because the registry is never destroyed.
  std::string full_name = FullName(name);
  r.add(r.registry, &full_name, &expander);
  return Status();
}

}  // namespace layoutmap
