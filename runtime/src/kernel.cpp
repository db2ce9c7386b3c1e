// kernel.cpp: manifest words to driver values, loading, launch geometry.
#include "kernel.h"

#include <algorithm>
#include <utility>

namespace ringfp4 {
namespace {

template <size_t size>
int find(const std::array<std::string_view, size>& names, const std::string& name, const char* what) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) throw std::invalid_argument(std::string(what) + " is unknown: '" + name + "'");
  return static_cast<int>(found - names.begin());
}

Param::Kind kind_of(const std::string& kind) {
  static constexpr std::array<std::string_view, 5> kinds = {"tensor_map", "pointer", "i32", "i64", "bytes"};
  return static_cast<Param::Kind>(find(kinds, kind, "parameter kind"));
}

CUtensorMapDataType dtype_of(const std::string& dtype) {
  static constexpr std::array<std::string_view, 3> names = {"u8", "u16", "bf16"};
  static constexpr CUtensorMapDataType values[] = {
      CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};
  return values[find(names, dtype, "tensor-map data type")];
}

CUtensorMapSwizzle swizzle_of(int bytes) {
  switch (bytes) {
    case 0:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case 128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    default:
      throw std::invalid_argument("swizzle is unknown: " + std::to_string(bytes) + " bytes");
  }
}

Extent extent_of(const std::variant<int64_t, std::string>& dim) {
  if (const auto* value = std::get_if<int64_t>(&dim)) return {kConstant, *value};
  return {static_cast<Symbol>(find(kSymbols, std::get<std::string>(dim), "symbol")), 0};
}

}  // namespace

Param::Param(const std::string& name, const std::string& kind_name, const std::string& dtype_name,
             const std::vector<std::variant<int64_t, std::string>>& dims_in,
             const std::vector<int64_t>& strides_in, const std::vector<int64_t>& box_in, int swizzle_bytes,
             int64_t size_in)
    : kind(kind_of(kind_name)), size(static_cast<size_t>(size_in)) {
  if (kind == Kind::kBytes) return;
  const bool scalar = kind == Kind::kI32 || kind == Kind::kI64;
  index = scalar ? find(kSymbols, name, "scalar") : find(kBuffers, name, "buffer");
  if (kind != Kind::kTensorMap) return;
  dtype = dtype_of(dtype_name);
  swizzle = swizzle_of(swizzle_bytes);
  for (const auto& dim : dims_in) dims.push_back(extent_of(dim));
  strides.assign(strides_in.begin(), strides_in.end());
  box.assign(box_in.begin(), box_in.end());
  if (dims.empty() || dims.size() > 5 || box.size() != dims.size() || strides.size() + 1 != dims.size()) {
    throw std::invalid_argument("tensor map of '" + name +
                                "' needs 1 to 5 dims, as many box extents, one stride less");
  }
}

size_t Param::bytes() const {
  switch (kind) {
    case Kind::kTensorMap:
      return sizeof(CUtensorMap);
    case Kind::kPointer:
    case Kind::kI64:
      return 8;
    case Kind::kI32:
      return 4;
    case Kind::kBytes:
      return size;
  }
  return 0;
}

Kernel::Kernel(std::shared_ptr<const Context> context, const std::string& image, KernelSpec spec)
    : context_(std::move(context)), spec_(std::move(spec)) {
  if (spec_.params.size() > kMaxParams || spec_.grid.rows_per_item < 1) {
    throw std::invalid_argument(spec_.name + " needs at most " + std::to_string(kMaxParams) +
                                " parameters and a positive rows_per_item");
  }
  const ContextScope scope(*context_);
  const Driver& driver = context_->driver();
  const RelaxedCapture relaxed(driver);
  driver.check(driver.cuModuleLoadData(&module_, image.data()), "cuModuleLoadData", spec_.name);
  try {
    prepare();
  } catch (...) {
    driver.cuModuleUnload(module_);
    throw;
  }
}

void Kernel::prepare() {
  const Driver& driver = context_->driver();
  driver.check(driver.cuModuleGetFunction(&function_, module_, spec_.entry.c_str()), "cuModuleGetFunction",
               spec_.entry);
  driver.check(driver.cuFuncLoad(function_), "cuFuncLoad", spec_.name);
  if (spec_.smem_bytes > 0) {
    driver.check(driver.cuFuncSetAttribute(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           static_cast<int>(spec_.smem_bytes)),
                 "cuFuncSetAttribute", spec_.name);
  }
  compare_params();
}

// A manifest that belongs to another cubin would make the kernel read wild pointers.
void Kernel::compare_params() const {
  const Driver& driver = context_->driver();
  size_t offset = 0;
  size_t bytes = 0;
  size_t count = 0;
  while (driver.cuFuncGetParamInfo(function_, count, &offset, &bytes) == CUDA_SUCCESS) {
    if (count < spec_.params.size() && bytes != spec_.params[count].bytes()) {
      throw Fault(Fault::Class::kArtifact,
                  "parameter " + std::to_string(count) + " of " + spec_.name + " has " +
                      std::to_string(bytes) + " bytes in the cubin, " +
                      std::to_string(spec_.params[count].bytes()) + " in the manifest",
                  "rebuild the folder: python -m ringfp4.build_cubins");
    }
    ++count;
  }
  if (count != spec_.params.size()) {
    throw Fault(Fault::Class::kArtifact,
                spec_.name + " has " + std::to_string(count) + " parameters in the cubin, " +
                    std::to_string(spec_.params.size()) + " in the manifest",
                "rebuild the folder: python -m ringfp4.build_cubins");
  }
}

Kernel::~Kernel() {
  if (forked()) return;
  const Driver& driver = context_->driver();
  try {
    const ContextScope scope(*context_);
    const RelaxedCapture relaxed(driver);
    driver.cuModuleUnload(module_);
  } catch (const Fault&) {
    // The context is gone, and the module with it.
  }
}

unsigned Kernel::ctas(int64_t m) const {
  const Grid& grid = spec_.grid;
  int64_t ctas = (m + grid.rows_per_item - 1) / grid.rows_per_item * grid.items;
  if (grid.ctas_per_sm > 0) ctas = std::min(ctas, grid.ctas_per_sm * context_->sms());
  return whole_clusters(ctas);
}

unsigned Kernel::max_ctas() const {
  const int64_t per_sm = spec_.grid.ctas_per_sm;
  return per_sm > 0 ? whole_clusters(per_sm * context_->sms()) : 0;
}

// At least one.
unsigned Kernel::whole_clusters(int64_t ctas) const {
  const int64_t cluster = int64_t{spec_.cluster[0]} * spec_.cluster[1] * spec_.cluster[2];
  return static_cast<unsigned>(std::max(ctas / cluster * cluster, cluster));
}

}  // namespace ringfp4
