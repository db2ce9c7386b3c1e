// driver.cpp: opening the driver library and naming what its calls return.
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

namespace ringfp4 {
namespace {

std::atomic<bool> g_forked{false};

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  (void)registered;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

const char* remedy_for(CUresult code) {
  switch (code) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return "free device memory (torch.cuda.empty_cache()) or use a Ring with fewer rows";
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_IMAGE:
      return "load cubins built for this device: python -m ringfp4.build_cubins --arch ARCH --out DIR";
    case CUDA_ERROR_NO_DEVICE:
      return "this machine has no visible GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES";
    case CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE:
      return "another program or MPS limit holds part of the GPU: use schedule='ring', which needs no grid "
             "that is resident as a whole";
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
      return "a kernel failed earlier, perhaps not one of ours; the process has lost the device, restart it";
    default:
      return "";
  }
}

}  // namespace

bool forked() { return g_forked.load(std::memory_order_relaxed); }

Driver::Driver(const std::string& path) {
  const char* install = "install an NVIDIA driver, 12.4 or newer; CPU tensors work without one";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Fault(Fault::Class::kDriver, std::string("no CUDA driver: ") + dlerror(), install);
  }
  const auto lookup = reinterpret_cast<decltype(&::cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  const auto get_version =
      reinterpret_cast<decltype(&::cuDriverGetVersion)>(dlsym(library, "cuDriverGetVersion"));
  if (lookup == nullptr || get_version == nullptr || get_version(&version_) != CUDA_SUCCESS) {
    throw Fault(Fault::Class::kDriver, path + " is older than CUDA 12.0 or no CUDA driver", install);
  }
  const auto resolve = [&](const char* name, auto& member) {
    void* address = nullptr;
    const CUresult result = lookup(name, &address, kDriverApiVersion, CU_GET_PROC_ADDRESS_DEFAULT, nullptr);
    if (result != CUDA_SUCCESS || address == nullptr) {
      throw Fault(Fault::Class::kDriver,
                  "the CUDA driver lacks " + std::string(name) + "; it is version " + version_text(version_),
                  install);
    }
    member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(address);
  };
#define RINGFP4_RESOLVE(name) resolve(#name, this->name);
  RINGFP4_DRIVER_CALLS(RINGFP4_RESOLVE)
#undef RINGFP4_RESOLVE
  check(cuInit(0), "cuInit");
  watch_forks();
}

void Driver::fail(CUresult result, std::string_view call, std::string_view subject) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS) name = "unknown error";
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS) text = "";
  std::string what(call);
  if (!subject.empty()) what.append(" of ").append(subject);
  what.append(" failed");
  if (*text != 0) what.append(": ").append(text);
  Fault fault(Fault::Class::kDriver, what, remedy_for(result));
  fault.code = static_cast<int>(result);
  fault.name = name;
  throw fault;
}

int Driver::device_count() const {
  int count = 0;
  check(cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

}  // namespace ringfp4
