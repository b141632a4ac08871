// Exceptions of the standard library as statuses.

#ifndef TF_LAYOUTMAP_CORE_BASE_CATCH_ALL_H_
#define TF_LAYOUTMAP_CORE_BASE_CATCH_ALL_H_

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {

// What the exception that is being handled says; call it inside `catch (...)`.
// Sizes come from outside, so that memory may be asked for that nobody has
// (std::bad_alloc) or that no container can hold (std::length_error). Nothing
// else is thrown on purpose: whatever it is, it is an internal error.
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

// What `run` returns, or what it throws as a status.
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
