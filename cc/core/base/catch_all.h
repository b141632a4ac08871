// Functions that convert C++ exceptions to statuses.

#ifndef TF_LAYOUTMAP_CORE_BASE_CATCH_ALL_H_
#define TF_LAYOUTMAP_CORE_BASE_CATCH_ALL_H_

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {

// Returns a status for the exception that is being handled. Call this function
// only inside `catch (...)`.
//
// The sizes of containers depend on the input. An allocation can therefore fail
// with std::bad_alloc, or with std::length_error if the size exceeds the limit
// of the container. The function converts both exceptions to `kOutOfMemory`. It
// converts every other exception to `kInternal`, because the core does not
// throw other exceptions on purpose.
inline Status StatusOfException() {
  try {
    throw;
  } catch (const std::bad_alloc& error) {
    return OutOfMemory(std::string("Out of memory (") + error.what() + ")");
  } catch (const std::length_error& error) {
    return OutOfMemory(std::string("Out of memory (") + error.what() + ")");
  } catch (const std::exception& error) {
    return Internal(std::string("Internal error: ") + error.what());
  } catch (...) {
    return Internal("Internal error: an unknown exception");
  }
}

// Returns the status that `run` returns, or the status for the exception that
// `run` throws.
template <typename Run>
Status CatchAll(const Run& run) {
  try {
    return run();
  } catch (...) {
    return StatusOfException();
  }
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_CATCH_ALL_H_
