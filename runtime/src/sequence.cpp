// sequence.cpp: parameters, tensor maps and launches.
#include "sequence.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace ringfp4 {
namespace {

constexpr int64_t kBlockRows = 128;    // rows of a tile of the swizzled scales
constexpr int32_t kScaleIsGiven = -1;  // in place of a rule, for kernels that can also reduce

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::vector<Step> steps_of(const Sequence::Kernels& kernels) {
  std::vector<Step> steps;
  for (const auto& kernel : kernels) steps.emplace_back(kernel);
  return steps;
}

}  // namespace

Step::Step(std::shared_ptr<const Kernel> kernel) : kernel_(std::move(kernel)) {
  const auto& params = kernel_->spec().params;
  slots_.resize(params.size());
  size_t unread = 0;
  for (const Param& param : params) {
    if (param.kind == Param::Kind::kBytes) unread = std::max(unread, param.size);
  }
  unread_.resize(unread);
}

void Step::encode(const Param& param, const Values& values, Slot& slot) {
  std::array<cuuint64_t, 5> dims{};
  for (size_t i = 0; i < param.dims.size(); ++i) {
    const Extent& extent = param.dims[i];
    dims[i] = extent.symbol == kConstant ? extent.value : values.number[extent.symbol];
  }
  const CUdeviceptr base = values.address[param.index];
  if (base != 0 && base == slot.base && dims == slot.dims) return;
  static constexpr std::array<cuuint32_t, 5> kUnitSteps = {1, 1, 1, 1, 1};
  const Driver& driver = kernel_->context().driver();
  slot.base = 0;
  driver.check(driver.cuTensorMapEncodeTiled(
                   &slot.map, param.dtype, static_cast<cuuint32_t>(param.dims.size()),
                   reinterpret_cast<void*>(base), dims.data(), param.strides.data(), param.box.data(),
                   kUnitSteps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, param.swizzle,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "cuTensorMapEncodeTiled", kBuffers[param.index]);
  slot.base = base;
  slot.dims = dims;
}

void* Step::fill(size_t index, const Values& values) {
  const Param& param = kernel_->spec().params[index];
  Slot& slot = slots_[index];
  switch (param.kind) {
    case Param::Kind::kTensorMap:
      encode(param, values, slot);
      return &slot.map;
    case Param::Kind::kPointer:
      slot.word = static_cast<int64_t>(values.address[param.index]);
      return &slot.word;
    case Param::Kind::kI32:  // little-endian: the low half comes first
    case Param::Kind::kI64:
      slot.word = values.number[param.index];
      return &slot.word;
    case Param::Kind::kBytes:
      return unread_.data();
  }
  return nullptr;
}

void Step::launch(const Values& values, CUstream stream, bool follows) {
  const KernelSpec& spec = kernel_->spec();
  std::array<void*, kMaxParams> params{};
  for (size_t i = 0; i < spec.params.size(); ++i) params[i] = fill(i, values);
  std::array<CUlaunchAttribute, 3> attributes{};
  unsigned count = 0;
  if (spec.cluster != std::array<unsigned, 3>{1, 1, 1}) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count++].value.clusterDim = {spec.cluster[0], spec.cluster[1], spec.cluster[2]};
  }
  if (spec.cooperative) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[count++].value.cooperative = 1;
  }
  if (spec.programmatic && follows) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count++].value.programmaticStreamSerializationAllowed = 1;
  }
  CUlaunchConfig config{};
  config.gridDimX = kernel_->ctas(values.number[kM]);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = spec.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = spec.smem_bytes;
  config.hStream = stream;
  config.attrs = attributes.data();
  config.numAttrs = count;
  const Driver& driver = kernel_->context().driver();
  driver.check(driver.cuLaunchKernelEx(&config, kernel_->function(), params.data(), nullptr),
               "cuLaunchKernelEx", spec.name);
}

Sequence::Sequence(const Kernels& reduce, const Kernels& whole, const Kernels& each_chunk,
                   int64_t capacity_rows, int64_t q_row_bytes, int64_t sf_row_bytes, int64_t y_row_bytes)
    : reduce_(steps_of(reduce)),
      whole_(steps_of(whole)),
      each_chunk_(steps_of(each_chunk)),
      capacity_rows_(capacity_rows),
      q_row_bytes_(q_row_bytes),
      sf_row_bytes_(sf_row_bytes),
      y_row_bytes_(y_row_bytes) {
  for (const Kernels* kernels : {&reduce, &whole, &each_chunk}) {
    if (!kernels->empty()) context_ = &kernels->front()->context();
  }
  if (context_ == nullptr) throw std::invalid_argument("a sequence needs at least one kernel");
}

void Sequence::run(const Call& call, Ring* ring) {
  context_->explaining([&] {
    const ContextScope scope(*context_);
    std::optional<Ring::Use> use;
    if (ring != nullptr) use.emplace(*ring, call.stream);
    const std::lock_guard<std::mutex> lock(mutex_);  // the parameters' memory is shared by all runs
    const CUdeviceptr slots = ring != nullptr ? ring->data() : 0;
    const CUdeviceptr state = ring != nullptr ? ring->state() : 0;
    launch_all(call, call.slots != 0 ? call.slots : slots, call.state != 0 ? call.state : state);
  });
}

void Sequence::launch_all(const Call& call, CUdeviceptr slots, CUdeviceptr state) {
  const int64_t capacity = capacity_rows_ > 0 ? capacity_rows_ : ceil_div(call.m, kBlockRows) * kBlockRows;
  Step::Values values;
  auto& address = values.address;
  auto& number = values.number;
  address[kScale] = call.scale != 0 ? call.scale : state + kScaleOffset;
  address[kW] = call.w;
  address[kWSf] = call.w_sf;
  address[kWScale] = call.w_scale;
  address[kBias] = call.bias;
  address[kQ] = slots;
  address[kSf] = slots + static_cast<CUdeviceptr>(capacity * q_row_bytes_);
  const CUdeviceptr behind = address[kSf] + static_cast<CUdeviceptr>(capacity * sf_row_bytes_);
  address[kPartials] = call.partials != 0 ? call.partials : behind;
  address[kAmaxState] = state + kAmaxStateOffset;
  address[kCounters] = state + kCountersOffset;
  address[kFlags] = state + kFlagsOffset;
  address[kPacked] = call.packed;
  address[kStatus] = reinterpret_cast<CUdeviceptr>(const_cast<uint32_t*>(context_->status()));
  number[kCap] = capacity;
  number[kCapBlocks] = ceil_div(capacity, kBlockRows);
  number[kXStride] = call.x_stride;
  number[kRule] = call.scale != 0 ? kScaleIsGiven : call.rule;
  const auto select_rows = [&](int64_t first, int64_t rows) {
    address[kX] = call.x + static_cast<CUdeviceptr>(first * call.x_stride * 2);
    address[kY] = call.y + static_cast<CUdeviceptr>(first * y_row_bytes_);
    number[kM] = rows;
    number[kMBlocks] = ceil_div(rows, kBlockRows);
  };

  // The first kernel waits for whatever the stream did before, as a whole; the others wait for the one
  // before them from within, so that only their starts overlap.
  bool follows = false;
  const auto launch = [&](std::vector<Step>& steps) {
    for (Step& step : steps) {
      step.launch(values, call.stream, follows);
      follows = true;
    }
  };

  select_rows(0, call.m);
  if (call.scale == 0) launch(reduce_);
  launch(whole_);
  if (each_chunk_.empty()) return;
  for (int64_t first = 0; first < call.m; first += capacity) {
    select_rows(first, std::min(capacity, call.m - first));
    launch(each_chunk_);
  }
}

}  // namespace ringfp4
