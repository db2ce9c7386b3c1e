// kernel.h: one cubin loaded into one context, with what the manifest says about launching it.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "device.h"

namespace ringfp4 {

// Device buffers a kernel can name. The order is that of Call::address.
inline constexpr std::array<std::string_view, 15> kBuffers = {
    "x",  "scale",      "w",        "w_sf",   "w_scale", "bias",     "y",    "q",
    "sf", "amax_state", "counters", "packed", "status",  "partials", "flags"};
enum Buffer : int {
  kX,
  kScale,
  kW,
  kWSf,
  kWScale,
  kBias,
  kY,
  kQ,
  kSf,
  kAmaxState,
  kCounters,
  kPacked,
  kStatus,
  kPartials,
  kFlags
};

// Numbers a kernel's scalars and tensor-map extents can name; m_blocks = ceil(m / 128).
inline constexpr std::array<std::string_view, 6> kSymbols = {"m",          "m_blocks", "cap",
                                                             "cap_blocks", "x_stride", "rule"};
enum Symbol : int { kM, kMBlocks, kCap, kCapBlocks, kXStride, kRule, kConstant };

// A number of the manifest or a symbol that has its value at launch.
struct Extent {
  Symbol symbol = kConstant;
  int64_t value = 0;
};

// One parameter of the kernel's entry, as ringfp4.dsl.config.base.Param describes it.
struct Param {
  enum class Kind { kTensorMap, kPointer, kI32, kI64, kBytes };

  Param(const std::string& name, const std::string& kind, const std::string& dtype,
        const std::vector<std::variant<int64_t, std::string>>& dims, const std::vector<int64_t>& strides,
        const std::vector<int64_t>& box, int swizzle, int64_t size);

  size_t bytes() const;

  Kind kind;
  int index = 0;  // of kBuffers (tensor map, pointer) or kSymbols (scalar)
  CUtensorMapDataType dtype = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  std::vector<Extent> dims;         // elements, innermost first
  std::vector<cuuint64_t> strides;  // bytes, of dims 1..
  std::vector<cuuint32_t> box;      // elements
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  size_t size = 0;  // kBytes only
};

// CTAs = ceil(m / rows_per_item) * items, at most ctas_per_sm * SMs unless that is 0.
struct Grid {
  int64_t rows_per_item = 1;
  int64_t items = 1;
  int64_t ctas_per_sm = 0;
};

inline constexpr size_t kMaxParams = 32;

struct KernelSpec {
  std::string name;   // for messages
  std::string entry;  // of the cubin
  unsigned threads = 0;
  unsigned smem_bytes = 0;
  std::array<unsigned, 3> cluster = {1, 1, 1};
  bool cooperative = false;   // all CTAs must be resident together
  bool programmatic = false;  // waits by itself for the kernel before it: may be launched early
  Grid grid;
  std::vector<Param> params;
};

// Loads the cubin at construction, completely: nothing is left for the first launch.
class Kernel {
 public:
  Kernel(std::shared_ptr<const Context> context, const std::string& image, KernelSpec spec);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const Context& context() const { return *context_; }
  const KernelSpec& spec() const { return spec_; }
  CUfunction function() const { return function_; }
  unsigned ctas(int64_t m) const;
  // The most that a launch can have, whatever its rows; 0 if they alone limit it.
  unsigned max_ctas() const;

 private:
  unsigned whole_clusters(int64_t ctas) const;
  void prepare();
  void compare_params() const;

  std::shared_ptr<const Context> context_;
  KernelSpec spec_;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

}  // namespace ringfp4
