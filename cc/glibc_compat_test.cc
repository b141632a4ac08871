// Tests the functions in glibc_compat.cc. The test program is linked with
// glibc_compat, so it calls the replacements.

#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace {

TEST(GlibcCompat, AWaitEndsAfterItsTime) {
  std::mutex mutex;
  std::condition_variable condition;
  std::unique_lock<std::mutex> lock(mutex);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(condition.wait_for(lock, std::chrono::milliseconds(30),
                                  [] { return false; }));
  EXPECT_GE(std::chrono::steady_clock::now() - start,
            std::chrono::milliseconds(30));
}

TEST(GlibcCompat, AWaitWithoutAnEndIsWokenUp) {
  std::mutex mutex;
  std::condition_variable condition;
  bool is_set = false;
  std::thread other([&] {
    std::lock_guard<std::mutex> lock(mutex);
    is_set = true;
    condition.notify_one();
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    while (!is_set) {
      condition.wait_until(lock, std::chrono::steady_clock::time_point::max());
    }
  }
  other.join();
  EXPECT_TRUE(is_set);
}

TEST(GlibcCompat, ADeadlineOfThePastEndsAtOnce) {
  std::mutex mutex;
  std::condition_variable condition;
  std::unique_lock<std::mutex> lock(mutex);
  EXPECT_EQ(condition.wait_until(lock, std::chrono::steady_clock::now() -
                                           std::chrono::seconds(5)),
            std::cv_status::timeout);
}

TEST(GlibcCompat, LocksExclude) {
  std::mutex mutex;
  std::shared_mutex shared;
  int count = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        if (i % 4 == 0) {
          std::shared_lock<std::shared_mutex> lock(shared);
          EXPECT_LE(count, 3000);
          continue;
        }
        std::unique_lock<std::shared_mutex> lock(shared);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, 3000);
  std::unique_lock<std::mutex> held(mutex);
  std::thread([&] { EXPECT_FALSE(mutex.try_lock()); }).join();
}

TEST(GlibcCompat, AFunctionIsCalledOnce) {
  std::once_flag flag;
  int calls = 0;
  for (int i = 0; i < 3; ++i) std::call_once(flag, [&] { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST(GlibcCompat, ACopyOfAnExceptionOutlivesTheOriginal) {
  std::exception_ptr copy;
  {
    std::exception_ptr original;
    try {
      throw std::runtime_error(std::string(100, 'x'));
    } catch (...) {
      original = std::current_exception();
    }
    copy = original;
    std::vector<std::exception_ptr> more(10, copy);
  }
  for (int i = 0; i < 2; ++i) {
    try {
      std::rethrow_exception(copy);
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()), std::string(100, 'x'));
    }
  }
}

TEST(GlibcCompat, ANegativeSizeOfAnArrayThrows) {
  volatile long size = -1;
  EXPECT_THROW(std::unique_ptr<int[]>(new int[size]),
               std::bad_array_new_length);
}

TEST(GlibcCompat, LogarithmsAndSymbolsAreThere) {
  volatile double x = 10.0;
  EXPECT_DOUBLE_EQ(std::log(x), 2.302585092994045684);
  EXPECT_NE(dlsym(RTLD_DEFAULT, "printf"), nullptr);
}

}  // namespace
