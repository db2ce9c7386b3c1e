// driver.h: the CUDA driver through one dlopen, and the one exception this module throws.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace ringfp4 {

// A failure on its way to Python; `error_class` names a class of ringfp4.errors.
struct Fault : std::runtime_error {
  enum class Class { kDriver, kRing, kArtifact };

  Fault(Class error_class, const std::string& what, const std::string& remedy)
      : std::runtime_error(what), error_class(error_class), remedy(remedy) {}

  Class error_class;
  std::string remedy;
  int code = 0;      // CUresult of a driver call, else 0
  std::string name;  // its name, such as CUDA_ERROR_OUT_OF_MEMORY
};

// Everything the runtime calls. The oldest driver that has all of it is 12.4.
inline constexpr int kDriverApiVersion = 12040;
#define RINGFP4_DRIVER_CALLS(X) \
  X(cuInit)                     \
  X(cuGetErrorName)             \
  X(cuGetErrorString)           \
  X(cuDeviceGetCount)           \
  X(cuDeviceGet)                \
  X(cuDeviceGetName)            \
  X(cuDeviceGetAttribute)       \
  X(cuDevicePrimaryCtxRetain)   \
  X(cuDevicePrimaryCtxRelease)  \
  X(cuCtxGetCurrent)            \
  X(cuCtxPushCurrent)           \
  X(cuCtxPopCurrent)            \
  X(cuCtxSynchronize)           \
  X(cuModuleLoadData)           \
  X(cuModuleUnload)             \
  X(cuModuleGetFunction)        \
  X(cuFuncLoad)                 \
  X(cuFuncSetAttribute)         \
  X(cuFuncGetParamInfo)         \
  X(cuTensorMapEncodeTiled)     \
  X(cuLaunchKernelEx)           \
  X(cuMemAlloc)                 \
  X(cuMemFree)                  \
  X(cuMemsetD8Async)            \
  X(cuMemHostAlloc)             \
  X(cuMemFreeHost)              \
  X(cuEventCreate)              \
  X(cuEventDestroy)             \
  X(cuEventRecord)              \
  X(cuEventQuery)               \
  X(cuEventSynchronize)         \
  X(cuStreamWaitEvent)          \
  X(cuStreamGetCaptureInfo)     \
  X(cuThreadExchangeStreamCaptureMode)

// The table of driver functions. Opening it calls cuInit; the library is never closed again.
class Driver {
 public:
  // path: the library to open, normally "libcuda.so.1". Throws Fault.
  explicit Driver(const std::string& path);

  // Throws Fault unless result is CUDA_SUCCESS; `call` and `subject` say what failed.
  void check(CUresult result, std::string_view call, std::string_view subject = {}) const {
    if (result != CUDA_SUCCESS) fail(result, call, subject);
  }

  int version() const { return version_; }
  int device_count() const;

#define RINGFP4_MEMBER(name) decltype(&::name) name = nullptr;
  RINGFP4_DRIVER_CALLS(RINGFP4_MEMBER)
#undef RINGFP4_MEMBER

 private:
  [[noreturn]] void fail(CUresult result, std::string_view call, std::string_view subject) const;

  int version_ = 0;
};

// True in a child of a fork that followed a Driver: CUDA cannot be used there, nor cleaned up.
bool forked();

}  // namespace ringfp4
