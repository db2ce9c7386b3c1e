// device.cpp: devices, primary contexts, capture state.
#include "device.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace ringfp4 {
namespace {

constexpr size_t kStatusWords = 4;

// The words of dsl/ring_order.py (REASONS), by the first word of status.
constexpr std::array<std::string_view, 5> kReasons = {
    "for an unknown reason", "a loader waited for packed rows", "a packing warp waited for a free slot",
    "a warp waited for the absolute maximum of the other CTAs",
    "a CTA waited for the accumulators of another one"};

}  // namespace

Device::Device(std::shared_ptr<const Driver> driver, int ordinal)
    : driver_(std::move(driver)), ordinal_(ordinal) {
  driver_->check(driver_->cuDeviceGet(&handle_, ordinal), "cuDeviceGet", std::to_string(ordinal));
}

int Device::attribute(CUdevice_attribute which) const {
  int value = 0;
  driver_->check(driver_->cuDeviceGetAttribute(&value, which, handle_), "cuDeviceGetAttribute");
  return value;
}

std::string Device::name() const {
  char text[256] = {};
  driver_->check(driver_->cuDeviceGetName(text, sizeof(text), handle_), "cuDeviceGetName");
  return text;
}

Context::Context(std::shared_ptr<const Device> device) : device_(std::move(device)), sms_(device_->sms()) {
  driver().check(driver().cuDevicePrimaryCtxRetain(&handle_, device_->handle()), "cuDevicePrimaryCtxRetain");
  try {
    const ContextScope scope(*this);
    const RelaxedCapture relaxed(driver());
    void* status = nullptr;
    driver().check(
        driver().cuMemHostAlloc(&status, kStatusWords * sizeof(uint32_t), CU_MEMHOSTALLOC_PORTABLE),
        "cuMemHostAlloc");
    status_ = static_cast<uint32_t*>(status);
    std::fill_n(status_, kStatusWords, 0);
  } catch (...) {
    driver().cuDevicePrimaryCtxRelease(device_->handle());
    throw;
  }
}

Context::~Context() {
  if (forked()) return;
  try {
    const ContextScope scope(*this);
    const RelaxedCapture relaxed(driver());
    driver().cuMemFreeHost(status_);
  } catch (const Fault&) {
    // The context is gone, and its memory with it.
  }
  driver().cuDevicePrimaryCtxRelease(device_->handle());
}

Fault Context::explain(const Fault& fault) const {
  if (forked()) return fault;  // the parent's memory for it may not be here
  const volatile uint32_t* words = status();
  if (words[0] == 0) return fault;
  const uint32_t reason = words[0];
  std::string text = fault.what();
  text += "; a kernel had stopped before: ";
  text += kReasons[reason < kReasons.size() ? reason : 0];
  text += " (reason " + std::to_string(reason) + ", counter " + std::to_string(words[1]) + ", waited for " +
          std::to_string(words[2]) + ", saw " + std::to_string(words[3]) + "; docs/ring.md)";
  Fault explained(fault.error_class, text, fault.remedy);
  explained.code = fault.code;
  explained.name = fault.name;
  return explained;
}

ContextScope::ContextScope(const Context& context) : driver_(context.driver()) {
  if (forked()) {
    throw Fault(Fault::Class::kDriver,
                "CUDA was used before this process was forked, it does not survive that",
                "start workers with the 'spawn' method, or fork before the first CUDA call");
  }
  CUcontext current = nullptr;
  driver_.check(driver_.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current != context.handle()) {
    driver_.check(driver_.cuCtxPushCurrent(context.handle()), "cuCtxPushCurrent");
    pushed_ = true;
  }
}

ContextScope::~ContextScope() {
  CUcontext popped;
  if (pushed_) driver_.cuCtxPopCurrent(&popped);
}

cuuint64_t capture_id(const Driver& driver, CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  // The optional outputs differ between driver versions; they are null in all of them.
  driver.check(driver.cuStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr),
               "cuStreamGetCaptureInfo");
  return status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? id : 0;
}

}  // namespace ringfp4
