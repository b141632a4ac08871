// Access to tf.dtensor's registry of SPMD expanders, which is looked up at run
// time.

#ifndef TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_
#define TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_

#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {

// DTensor partitions an op by an expander, which determines the computation of
// each device and the layouts of the inputs and outputs. TensorFlow exports the
// functions of the registry but ships no header for them. This code does not
// use the classes in their signatures: an op of this package gets the same
// expander object as a stock op.
//
// Registers the expander of the stock op `donor` for op `name`. DTensor does
// not check that the expander is correct for the op. Fails if the registry
// cannot be found in this process, if `donor` has no expander, or if `name`
// already has one.
Status ShareExpander(const std::string& name, const std::string& donor);

// Returns OK, or an error with the reason why `ShareExpander` does not work.
Status ExpanderRegistryAvailable();

bool HasExpander(const std::string& name);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_
