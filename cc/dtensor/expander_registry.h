// tf.dtensor's registry of SPMD expanders, found by name at run time.

#ifndef TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_
#define TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_

#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {

// DTensor divides an op among devices by an expander: what each device runs,
// and which layouts go in and out. TensorFlow exports the functions of the
// registry but ships no header for them, and none of the classes in their
// signatures crosses here: an op of ours gets the very expander object that a
// stock op has.
//
// Says that op `name` is to be divided as the stock op `donor` is. It is a
// claim about the op: DTensor believes it. Refused if the registry cannot be
// found in this process, if `donor` has no expander, or if `name` has one.
Status ShareExpander(const std::string& name, const std::string& donor);

// Ok, or why `ShareExpander` cannot work here.
Status ExpanderRegistryAvailable();

bool HasExpander(const std::string& name);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_
