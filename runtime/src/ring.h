// ring.h: the bounded device memory that packed activations pass through.
#pragma once

#include <memory>
#include <mutex>

#include "device.h"

namespace ringfp4 {

// Layout of the state block: every kernel leaves amax_state, the counters and the flags zero. The counters
// are those of the ring's protocol; the flags, of the accumulators that CTAs hand on.
inline constexpr size_t kAmaxStateOffset = 0;
inline constexpr size_t kScaleOffset = 128;
inline constexpr size_t kCountersOffset = 256;
inline constexpr size_t kFlagsOffset = 16384;
inline constexpr size_t kStateBytes = 32768;

// One allocation: the slots and what a sequence puts behind them (data_bytes), then the state block. It
// serves one stream at a time.
//
// A private ring is used on the stream that it was made on, outside of captures, and nowhere else.
// Eager use of a shared one on another stream waits, on the device, for the use before. A graph
// that captured it owns it from then on, because the order of its replays cannot be known here.
class Ring {
 public:
  // Allocates, zeroes the state on `stream` and waits for that. Throws Fault.
  Ring(std::shared_ptr<const Context> context, size_t data_bytes, CUstream stream, bool shared);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  CUdeviceptr data() const { return memory_; }
  CUdeviceptr state() const { return memory_ + data_bytes_; }
  size_t data_bytes() const { return data_bytes_; }
  size_t bytes() const { return data_bytes_ + kStateBytes; }
  const Context& context() const { return *context_; }

  // The use of the ring by one sequence: holds the lock, orders streams on entry and exit.
  class Use {
   public:
    Use(Ring& ring, CUstream stream);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Ring& ring_;
    CUstream stream_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  void enter(CUstream stream);
  void free_memory();

  std::shared_ptr<const Context> context_;
  size_t data_bytes_;
  bool shared_;
  CUdeviceptr memory_ = 0;
  CUevent last_use_ = nullptr;
  CUstream last_stream_ = nullptr;
  cuuint64_t owner_capture_ = 0;
  std::mutex mutex_;
};

}  // namespace ringfp4
