// Test helper with a few threads that run scheduled functions.

#ifndef TF_LAYOUTMAP_EMULATION_WORKERS_TEST_H_
#define TF_LAYOUTMAP_EMULATION_WORKERS_TEST_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace layoutmap {

class Workers {
 public:
  explicit Workers(int num_threads) {
    for (int t = 0; t < num_threads; ++t) {
      threads_.emplace_back([this] { Run(); });
    }
  }
  // The threads run the remaining functions before they end.
  ~Workers() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Schedule(std::function<void()> work) {
    // The notification is sent while the lock is held. Otherwise, a worker
    // could run the work, and the test could end and destroy the workers before
    // the notification is sent.
    std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return is_ending_ || !work_.empty(); });
        if (work_.empty()) return;
        work = std::move(work_.front());
        work_.pop_front();
      }
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool is_ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_WORKERS_TEST_H_
