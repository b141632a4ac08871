// The result of a core call: fine, or why not.

#ifndef TF_LAYOUTMAP_CORE_BASE_STATUS_H_
#define TF_LAYOUTMAP_CORE_BASE_STATUS_H_

#include <string>
#include <utility>

namespace layoutmap {

enum class Code {
  kOk,
  kInvalidArgument,     // a value that came in is wrong
  kFailedPrecondition,  // a call that came at the wrong time
  kNotYet,  // the same, but a call of somebody else may still make it right
  kOutOfMemory,  // no memory holds what was asked for
  kInternal,     // an error that no input explains
};

// [[nodiscard]]: an error that nobody looks at is a wrong result later.
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
