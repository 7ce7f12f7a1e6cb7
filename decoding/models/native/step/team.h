// A team of threads that stays together for a whole forward, and the work that it shares.

#pragma once

#include <dlfcn.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The OpenMP runtime that PyTorch has loaded, by its calling convention for compiled parallel regions.
// A team of its threads cannot get in the way of PyTorch's own operations, whose waiting threads spin for
// milliseconds: on two cores, a team of other threads made forwards that follow them up to 1.6 times as long.
struct OpenMP {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  int (*rank)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
  int (*size)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
  bool works() const { return parallel != nullptr && rank != nullptr && size != nullptr; }
};
const OpenMP open_mp;
const pid_t loaded_by = getpid();

// A count that threads wait for. They spin for a short time and then sleep, so that on busy cores the
// thread that has work gets them. A thread that yields instead (as the standard library's waits do
// first) gives its core to another process for milliseconds, although the others need microseconds.
class Count {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void wait_while(uint32_t old) {
    for (int spins = 0; spins < SPINS; ++spins) {
      if (value() != old) return;
      pause();
    }
    sleepers_.fetch_add(1);
    while (value_.load() == old) sleep(old);
    sleepers_.fetch_sub(1);
  }
  // The order of all operations on both numbers is the same for all threads (the default of atomics):
  // either the one that increments sees the sleeper, or the sleeper sees the new value.
  void increment() {
    value_.fetch_add(1);
    if (sleepers_.load() != 0) wake();
  }

 private:
  static constexpr int SPINS = 2000;  // some 50 microseconds: barriers wait less, an idle team sleeps

#if defined(__linux__)
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  void sleep(uint32_t old) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t old) { value_.wait(old); }
  void wake() { value_.notify_all(); }
#endif

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// Threads that run one function at a time together, the calling thread among them: OpenMP's where there
// are such, else the team's own.
class Team {
 public:
  explicit Team(int size) : size_(size), members_(size), process_(getpid()) {
    if (open_mp.works() && process_ == loaded_by) return;  // a forked copy lacks OpenMP's threads
    for (int rank = 1; rank < size; ++rank) workers_.emplace_back([this, rank] { work(rank); });
  }
  ~Team() {
    if (process_ != getpid()) {  // a forked copy has no such threads
      for (auto& worker : workers_) worker.detach();
      return;
    }
    function_ = nullptr;
    job_.increment();
    for (auto& worker : workers_) worker.join();
  }
  bool fits(int size) const { return size == size_ && process_ == getpid(); }
  int size() const { return size_; }

  void run(void (*function)(void*, int), void* argument) {
    function_ = function;
    argument_ = argument;
    if (size_ > 1 && workers_.empty()) {
      open_mp.parallel(&Team::join, this, unsigned(size_), 0);
      return;
    }
    job_.increment();
    function(argument, 0);
    barrier();
  }

  void barrier() {
    const uint32_t round = round_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_.load(std::memory_order_relaxed)) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.increment();
      return;
    }
    round_.wait_while(round);
  }

 private:
  static void join(void* self) {
    Team& team = *static_cast<Team*>(self);
    team.members_.store(open_mp.size(), std::memory_order_relaxed);  // OpenMP may give fewer threads
    team.function_(team.argument_, open_mp.rank());
    team.barrier();  // OpenMP's own at the end of the region may spin for longer
  }
  void work(int rank) {
    for (uint32_t seen = 0;; ++seen) {
      job_.wait_while(seen);
      if (function_ == nullptr) return;
      function_(argument_, rank);
      barrier();
    }
  }

  const int size_;
  std::atomic<int> members_;  // threads of the running region
  const pid_t process_;
  std::vector<std::thread> workers_;
  void (*function_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  Count job_;
  alignas(64) std::atomic<int> arrived_{0};
  Count round_;
};

// Work that the team shares: each thread takes the next piece until none is left, so a thread that the
// system delays leaves its pieces to the others.
class Pieces {
 public:
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace
