// Provides access to tf.dtensor's registry of SPMD expanders. The functions of
// the registry are looked up at run time.

#ifndef TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_
#define TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_

#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {

// DTensor uses an expander to partition an op. The expander determines the
// computation of each device and the layouts of the inputs and outputs.
// TensorFlow exports the functions of the registry, but it does not ship a
// header for them. This code does not need the classes in the signatures of
// these functions, because an op of this package gets the same expander object
// as a stock op.
//
// Registers the expander of the stock op `donor` for the op `name`. DTensor
// does not check that the expander is correct for the op. Returns an error if
// the registry cannot be found in this process, if `donor` has no expander, or
// if `name` already has an expander.
Status ShareExpander(const std::string& name, const std::string& donor);

// Returns an error if `ShareExpander` cannot work in this process. The error
// message contains the reason.
Status ExpanderRegistryAvailable();

bool HasExpander(const std::string& name);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_DTENSOR_EXPANDER_REGISTRY_H_
