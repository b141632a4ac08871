// The result of a core call: success, or an error code with a message.

#ifndef TF_LAYOUTMAP_CORE_BASE_STATUS_H_
#define TF_LAYOUTMAP_CORE_BASE_STATUS_H_

#include <string>
#include <utility>

namespace layoutmap {

enum class Code {
  kOk,
  // An argument has an invalid value.
  kInvalidArgument,
  // The call is not valid in the current state.
  kFailedPrecondition,
  // The call is not valid yet, but calls by other threads can make it valid.
  kNotYet,
  // An allocation failed.
  kOutOfMemory,
  // An error occurred that the input did not cause.
  kInternal,
};

// The class is [[nodiscard]] because ignored errors lead to wrong results
// later.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string message) {
  return Status(Code::kInvalidArgument, std::move(message));
}

inline Status FailedPrecondition(std::string message) {
  return Status(Code::kFailedPrecondition, std::move(message));
}

inline Status NotYet(std::string message) {
  return Status(Code::kNotYet, std::move(message));
}

inline Status OutOfMemory(std::string message) {
  return Status(Code::kOutOfMemory, std::move(message));
}

inline Status Internal(std::string message) {
  return Status(Code::kInternal, std::move(message));
}

}  // namespace layoutmap

#define LM_RETURN_IF_ERROR(expression)            \
  do {                                            \
    ::layoutmap::Status lm_status = (expression); \
    if (!lm_status.ok()) return lm_status;        \
  } while (false)

#endif  // TF_LAYOUTMAP_CORE_BASE_STATUS_H_
