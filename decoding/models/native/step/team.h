// A team of threads that stays together for a whole forward, and the work that it shares.

#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
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

// Threads that run one function at a time together, the calling thread among them: OpenMP's where there
// are such, else the team's own. They spin for a short time and then sleep or yield, so that on busy
// cores the thread that has work gets them.
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
    begin();
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
    running_.store(size_ - 1, std::memory_order_relaxed);
    begin();
    function(argument, 0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) idle(spins);
  }

  void barrier() {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_.load(std::memory_order_relaxed)) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) idle(spins);
  }

 private:
  static constexpr int SPINS = 2000;  // some 50 microseconds: barriers wait less, an idle team sleeps

  static void idle(int spins) {
    if (spins < SPINS)
      pause();
    else
      std::this_thread::yield();
  }
  static void join(void* self) {
    Team& team = *static_cast<Team*>(self);
    team.members_.store(open_mp.size(), std::memory_order_relaxed);  // OpenMP may give fewer threads
    team.function_(team.argument_, open_mp.rank());
    team.barrier();  // OpenMP's own at the end of the region does not yield
  }
  void begin() {
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
  }
  void work(int rank) {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < SPINS && job_.load(std::memory_order_acquire) == seen; ++spins) pause();
      job_.wait(seen, std::memory_order_acquire);
      ++seen;
      if (function_ == nullptr) return;
      function_(argument_, rank);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::atomic<int> members_;  // threads of the running region
  const pid_t process_;
  std::vector<std::thread> workers_;
  void (*function_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// Work that the team shares: each thread takes the next piece until none is left, so a thread that the
// system delays leaves its pieces to the others.
class Pieces {
 public:
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
  void reset() { next_.store(0, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace
