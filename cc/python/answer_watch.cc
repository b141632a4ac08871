// A thread that checks whether servers of a cluster answer, and closes the
// connections of this process to a server that does not answer. If the server
// is one of the first `num_required` servers, without which the program cannot
// continue, the thread also closes the connections to all other servers.
//
// TensorFlow waits for an answer without a deadline, and in some calls holds
// the lock of the Python interpreter meanwhile. No Python thread can therefore
// end such a call. If the connection is closed, the call raises an error.

#include "cc/python/answer_watch.h"

#include <dirent.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pybind11/stl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace layoutmap {
namespace {

// The preface of an HTTP/2 connection and an empty SETTINGS frame. Each gRPC
// server answers with a SETTINGS frame.
constexpr char kPreface[] =
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    "\0\0\0\4\0\0\0\0";
constexpr size_t kPrefaceSize = sizeof(kPreface);

// Durations in seconds: between two iterations of the thread, maximum time
// between two checks of a server, and maximum time of a check.
constexpr double kPause = 0.1;
constexpr double kMaxInterval = 5.0;
constexpr double kMaxCheck = 5.0;
// Minimum time between two times at which the connections to all servers are
// closed, so that the reasons can be found out in between.
constexpr double kMinCutAll = 30.0;

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Address {
  sockaddr_storage bytes = {};
  socklen_t size = 0;
};

// Returns the IP address in the form of IPv6, and the port.
bool Endpoint(const sockaddr* address, in6_addr* ip, uint16_t* port) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    std::memset(ip, 0, sizeof(*ip));
    ip->s6_addr[10] = ip->s6_addr[11] = 0xff;
    std::memcpy(&ip->s6_addr[12], &v4->sin_addr, 4);
    *port = v4->sin_port;
    return true;
  }
  if (address->sa_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
    *ip = v6->sin6_addr;
    *port = v6->sin6_port;
    return true;
  }
  return false;
}

bool IsConnectedTo(int socket, const Address& address) {
  Address peer;
  peer.size = sizeof(peer.bytes);
  auto* found = reinterpret_cast<sockaddr*>(&peer.bytes);
  if (getpeername(socket, found, &peer.size) != 0) return false;
  in6_addr ips[2];
  uint16_t ports[2];
  return Endpoint(found, &ips[0], &ports[0]) &&
         Endpoint(reinterpret_cast<const sockaddr*>(&address.bytes), &ips[1],
                  &ports[1]) &&
         ports[0] == ports[1] && std::memcmp(&ips[0], &ips[1], 16) == 0;
}

// Resolves "host:port"; the host of an IPv6 address may be in brackets.
std::vector<Address> Resolve(const std::string& name) {
  const size_t colon = name.rfind(':');
  std::string host = name.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  std::vector<Address> addresses;
  if (colon == std::string::npos ||
      getaddrinfo(host.c_str(), name.c_str() + colon + 1, &hints, &found) !=
          0) {
    return addresses;
  }
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    Address address;
    address.size = one->ai_addrlen;
    std::memcpy(&address.bytes, one->ai_addr, one->ai_addrlen);
    addresses.push_back(address);
  }
  freeaddrinfo(found);
  return addresses;
}

// One server, which the thread checks by separate short connections.
class Server {
 public:
  explicit Server(std::vector<Address> addresses)
      : addresses_(std::move(addresses)) {}

  ~Server() { End(0.0); }

  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Begins or continues a check. `passed` is the time since the last call, and
  // `interval` the time between two checks.
  void Check(double passed, double interval) {
    const double now = Now();
    // Between two checks, it is not known whether the server answers.
    if (!answered_) silent_ += passed;
    if (socket_ < 0) {
      if (now < next_ || addresses_.empty()) return;
      answered_ = false;
      Begin(now);
      if (socket_ < 0) return;
    }
    pollfd ready = {socket_, static_cast<int16_t>(sent_ ? POLLIN : POLLOUT), 0};
    if (poll(&ready, 1, 0) > 0) {
      if (sent_) {
        char answer;
        if (recv(socket_, &answer, 1, 0) == 1) {
          answered_ = true;
          silent_ = 0.0;
        }
        End(now + interval);
      } else if (HasError() ||
                 send(socket_, kPreface, kPrefaceSize, MSG_NOSIGNAL) < 0) {
        End(now + interval);
      } else {
        sent_ = true;
      }
    } else if (now - began_ > kMaxCheck) {
      End(now);
    }
  }

  // Closes all connections of this process to the server. Returns whether there
  // was a connection.
  bool Cut() {
    bool found = false;
    DIR* folder = opendir("/proc/self/fd");
    if (folder == nullptr) return found;
    while (const dirent* entry = readdir(folder)) {
      const int descriptor = std::atoi(entry->d_name);
      if (entry->d_name[0] == '.' || descriptor == socket_) continue;
      for (const Address& address : addresses_) {
        if (IsConnectedTo(descriptor, address)) {
          found |= shutdown(descriptor, SHUT_RDWR) == 0;
        }
      }
    }
    closedir(folder);
    return found;
  }

  // Returns the time since the first of the checks without an answer.
  double silent() const { return silent_; }

 private:
  void Begin(double now) {
    // The next check uses the next address of the host.
    const Address& address = addresses_[num_checks_++ % addresses_.size()];
    socket_ = socket(address.bytes.ss_family,
                     SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (socket_ < 0) return;
    began_ = now;
    sent_ = false;
    if (connect(socket_, reinterpret_cast<const sockaddr*>(&address.bytes),
                address.size) != 0 &&
        errno != EINPROGRESS) {
      End(now + kPause);
    }
  }

  bool HasError() const {
    int error = 0;
    socklen_t size = sizeof(error);
    return getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size) != 0 ||
           error != 0;
  }

  void End(double next) {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
    next_ = next;
  }

  const std::vector<Address> addresses_;
  size_t num_checks_ = 0;
  int socket_ = -1;
  bool sent_ = false;
  bool answered_ = false;
  double began_ = 0.0;
  double next_ = 0.0;
  double silent_ = 0.0;
};

// State that the thread shares with the Python object.
struct State {
  std::atomic<bool> ended{false};
  size_t num_required = 0;
  std::atomic<double> seconds{0.0};
  std::vector<std::unique_ptr<Server>> servers;
  std::vector<std::atomic<double>> silent;
  std::vector<std::atomic<int64_t>> num_cuts;

  explicit State(size_t size) : silent(size), num_cuts(size) {}
};

void Watch(const std::shared_ptr<State>& state) {
  double before = Now();
  std::vector<double> cut_all_at(state->servers.size(), 0.0);
  while (!state->ended) {
    std::this_thread::sleep_for(std::chrono::duration<double>(kPause));
    const double now = Now();
    // If this process was stopped, the time does not count.
    const double passed = std::min(now - before, 10 * kPause);
    before = now;
    const double seconds = state->seconds;
    for (size_t i = 0; i < state->servers.size(); ++i) {
      Server* server = state->servers[i].get();
      server->Check(passed, std::min(seconds / 4, kMaxInterval));
      const double silent = server->silent();
      state->silent[i] = silent;
      if (silent <= seconds) {
        cut_all_at[i] = seconds;
        continue;
      }
      state->num_cuts[i] += server->Cut();
      // Another server may wait for this server, and this program for the other
      // server.
      if (i < state->num_required && silent > cut_all_at[i]) {
        cut_all_at[i] = silent + std::max(seconds, kMinCutAll);
        for (const auto& one : state->servers) one->Cut();
      }
    }
  }
}

class AnswerWatch {
 public:
  AnswerWatch(const std::vector<std::string>& addresses, double seconds,
              size_t num_required)
      : state_(std::make_shared<State>(addresses.size())) {
    SetSeconds(seconds);
    state_->num_required = num_required;
    for (const std::string& one : addresses) {
      state_->servers.push_back(std::make_unique<Server>(Resolve(one)));
    }
    // The thread is detached, because a forked process has the object but not
    // the thread.
    std::thread(Watch, state_).detach();
  }

  ~AnswerWatch() { End(); }

  void SetSeconds(double seconds) {
    if (!(seconds > 0)) {
      throw std::invalid_argument("`seconds` must be above 0.");
    }
    state_->seconds = seconds;
  }

  std::vector<double> silent() const {
    return {state_->silent.begin(), state_->silent.end()};
  }

  int64_t num_cuts() const {
    int64_t sum = 0;
    for (const auto& one : state_->num_cuts) sum += one;
    return sum;
  }

  void End() { state_->ended = true; }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace

void DefineAnswerWatch(py::module_* m) {
  py::class_<AnswerWatch>(
      *m, "AnswerWatch",
      "A thread that closes connections to servers that do not answer.")
      .def(py::init<const std::vector<std::string>&, double, size_t>(),
           py::arg("addresses"), py::arg("seconds"), py::arg("num_required"),
           py::call_guard<py::gil_scoped_release>())
      .def("set_seconds", &AnswerWatch::SetSeconds, py::arg("seconds"),
           "Sets the time without an answer after which connections are "
           "closed.")
      .def_property_readonly("silent", &AnswerWatch::silent,
                             "Seconds for which each server has not answered.")
      .def_property_readonly("num_cuts", &AnswerWatch::num_cuts,
                             "Number of times that connections were closed.")
      .def("end", &AnswerWatch::End, "Ends the thread.");
}

}  // namespace layoutmap
