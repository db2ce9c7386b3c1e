// device.h: one GPU, its primary context, and the scopes in which driver calls are made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "driver.h"

namespace ringfp4 {

// A GPU as the driver describes it; making one creates no context.
class Device {
 public:
  Device(std::shared_ptr<const Driver> driver, int ordinal);

  const Driver& driver() const { return *driver_; }
  const std::shared_ptr<const Driver>& shared_driver() const { return driver_; }
  CUdevice handle() const { return handle_; }
  int ordinal() const { return ordinal_; }
  int attribute(CUdevice_attribute which) const;
  std::string name() const;
  int major() const { return attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR); }
  int minor() const { return attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR); }
  int sms() const { return attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT); }

 private:
  std::shared_ptr<const Driver> driver_;
  int ordinal_;
  CUdevice handle_ = 0;
};

// A device's primary context (the one torch uses), retained while this object lives.
class Context {
 public:
  explicit Context(std::shared_ptr<const Device> device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const { return device_->driver(); }
  const Device& device() const { return *device_; }
  CUcontext handle() const { return handle_; }
  int sms() const { return sms_; }

  // Where a kernel writes why it stopped before it traps: four words of host memory, which outlive
  // the context that the trap destroys. The first word is 0 as long as all is well.
  const volatile uint32_t* status() const { return status_; }

  // Runs `calls`. After a kernel that gave up waiting has trapped, every call of the driver fails:
  // the Fault that leaves here then says what the kernel waited for.
  template <class Calls>
  auto explaining(const Calls& calls) const {
    try {
      return calls();
    } catch (const Fault& fault) {
      throw explain(fault);
    }
  }

 private:
  Fault explain(const Fault& fault) const;

  std::shared_ptr<const Device> device_;
  CUcontext handle_ = nullptr;
  int sms_ = 0;
  uint32_t* status_ = nullptr;
};

// Makes a context current on this thread for as long as it lives. Throws Fault after a fork.
class ContextScope {
 public:
  explicit ContextScope(const Context& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// Allows calls, such as an allocation, that would break a capture running in another thread.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Identity of the graph capture that is running on a stream, 0 if none. The context is current.
cuuint64_t capture_id(const Driver& driver, CUstream stream);

}  // namespace ringfp4
