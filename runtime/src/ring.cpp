// ring.cpp: allocation, ordering between streams, ownership by graphs.
#include "ring.h"

#include <utility>

namespace ringfp4 {

Ring::Ring(std::shared_ptr<const Context> context, size_t data_bytes, CUstream stream, bool shared)
    : context_(std::move(context)), data_bytes_(data_bytes), shared_(shared), last_stream_(stream) {
  const ContextScope scope(*context_);
  const Driver& driver = context_->driver();
  if (capture_id(driver, stream) != 0) {
    throw Fault(Fault::Class::kRing, "a ring cannot be allocated while its stream is being captured",
                "make the Ring before the capture");
  }
  const RelaxedCapture relaxed(driver);
  driver.check(driver.cuMemAlloc(&memory_, bytes()), "cuMemAlloc",
               "a ring of " + std::to_string(bytes()) + " bytes");
  try {
    driver.check(driver.cuMemsetD8Async(state(), 0, kStateBytes, stream), "cuMemsetD8Async");
    driver.check(driver.cuEventCreate(&last_use_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    driver.check(driver.cuEventRecord(last_use_, stream), "cuEventRecord");
    driver.check(driver.cuEventSynchronize(last_use_), "cuEventSynchronize");
  } catch (...) {
    free_memory();
    throw;
  }
}

Ring::~Ring() {
  if (forked()) return;
  const Driver& driver = context_->driver();
  try {
    const ContextScope scope(*context_);
    const RelaxedCapture relaxed(driver);
    // Kernels may still be using the memory. Of a private ring no event tells.
    if (shared_) {
      driver.cuEventSynchronize(last_use_);
    } else {
      driver.cuCtxSynchronize();
    }
    free_memory();
  } catch (const Fault&) {
    // The context is gone, and the memory with it.
  }
}

void Ring::free_memory() {
  if (last_use_ != nullptr) context_->driver().cuEventDestroy(last_use_);
  context_->driver().cuMemFree(memory_);
}

void Ring::enter(CUstream stream) {
  const Driver& driver = context_->driver();
  const cuuint64_t capture = capture_id(driver, stream);
  if (owner_capture_ != 0 && capture != owner_capture_) {
    throw Fault(Fault::Class::kRing, "this ring belongs to a CUDA graph that captured it",
                "use another Ring here, and one Ring for each graph");
  }
  if (stream == last_stream_ && capture == owner_capture_) return;
  if (capture != 0 && owner_capture_ == 0) {
    // A capture cannot wait for work outside of it, so that work has to be over.
    const RelaxedCapture relaxed(driver);
    if (driver.cuEventQuery(last_use_) != CUDA_SUCCESS) {
      throw Fault(Fault::Class::kRing,
                  "this ring is still in use by work outside of the CUDA graph being captured",
                  "synchronise that stream before the capture, or give the graph a Ring of its own");
    }
    owner_capture_ = capture;
    return;
  }
  driver.check(driver.cuStreamWaitEvent(stream, last_use_, CU_EVENT_WAIT_DEFAULT), "cuStreamWaitEvent");
}

Ring::Use::Use(Ring& ring, CUstream stream) : ring_(ring), stream_(stream), lock_(ring.mutex_) {
  if (ring_.shared_) ring_.enter(stream);
}

// Also after a failed launch: what was launched before it still uses the ring.
Ring::Use::~Use() {
  const Driver& driver = ring_.context_->driver();
  if (ring_.shared_ && driver.cuEventRecord(ring_.last_use_, stream_) == CUDA_SUCCESS) {
    ring_.last_stream_ = stream_;
  }
}

}  // namespace ringfp4
