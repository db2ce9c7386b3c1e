// sequence.h: the launches of one linear, built once; a run only fills in pointers.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "kernel.h"
#include "ring.h"

namespace ringfp4 {

// What changes from run to run. Addresses are in bytes on the device, 0 where there is none.
struct Call {
  CUstream stream = nullptr;
  int64_t m = 0;         // rows of x
  int64_t x_stride = 0;  // elements between rows of x
  int32_t rule = 0;      // of the tensor scale: 0 fp32, 1 bf16
  CUdeviceptr x = 0;
  CUdeviceptr scale = 0;  // 0: reduce it from x
  CUdeviceptr w = 0;
  CUdeviceptr w_sf = 0;
  CUdeviceptr w_scale = 0;
  CUdeviceptr bias = 0;
  CUdeviceptr y = 0;
  CUdeviceptr packed = 0;    // what a repack kernel writes
  CUdeviceptr slots = 0;     // 0: the ring's
  CUdeviceptr state = 0;     // 0: the ring's
  CUdeviceptr partials = 0;  // 0: behind the slots
};

// A kernel and the memory its parameters are passed from. Tensor maps are encoded again only
// when their base or an extent changed.
class Step {
 public:
  explicit Step(std::shared_ptr<const Kernel> kernel);

  struct Values {
    std::array<CUdeviceptr, kBuffers.size()> address{};
    std::array<int64_t, kSymbols.size()> number{};
  };
  // follows: this run has launched a kernel before.
  void launch(const Values& values, CUstream stream, bool follows);

  const Kernel& kernel() const { return *kernel_; }

 private:
  struct alignas(64) Slot {  // CUtensorMap wants 64 bytes
    CUtensorMap map;
    int64_t word = 0;
    CUdeviceptr base = 0;  // of the encoded map, 0 if none
    std::array<cuuint64_t, 5> dims{};
  };
  void* fill(size_t index, const Values& values);
  void encode(const Param& param, const Values& values, Slot& slot);

  std::shared_ptr<const Kernel> kernel_;
  std::vector<Slot> slots_;
  std::vector<unsigned char> unread_;  // what parameters of kind bytes point to
};

// reduce (launched if the call brings no scale), then whole, both over all rows; then each_chunk
// over at most capacity_rows at a time, through the same slots in the order of the stream.
// capacity_rows 0: one chunk, however long.
class Sequence {
 public:
  using Kernels = std::vector<std::shared_ptr<const Kernel>>;

  Sequence(const Kernels& reduce, const Kernels& whole, const Kernels& each_chunk, int64_t capacity_rows,
           int64_t q_row_bytes, int64_t sf_row_bytes, int64_t y_row_bytes);

  // Launches; does not wait. Throws Fault. Without a ring, slots and state must be given if used.
  void run(const Call& call, Ring* ring);

 private:
  void launch_all(const Call& call, CUdeviceptr slots, CUdeviceptr state);

  std::vector<Step> reduce_;
  std::vector<Step> whole_;
  std::vector<Step> each_chunk_;
  const Context* context_ = nullptr;  // owned by the kernels
  int64_t capacity_rows_;
  int64_t q_row_bytes_;
  int64_t sf_row_bytes_;
  int64_t y_row_bytes_;
  std::mutex mutex_;
};

}  // namespace ringfp4
