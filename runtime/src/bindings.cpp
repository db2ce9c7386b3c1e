// bindings.cpp: the Python module ringfp4.runtime._core. Only integers, strings and bytes cross.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "sequence.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ringfp4;

namespace {

CUstream stream_of(uint64_t handle) { return reinterpret_cast<CUstream>(handle); }

// Raises the class of ringfp4.errors that the fault names.
void raise_fault(const Fault& fault) {
  nb::object errors = nb::module_::import_("ringfp4.errors");
  nb::dict arguments;
  arguments["remedy"] = fault.remedy;
  const char* class_name = "RingError";
  if (fault.error_class == Fault::Class::kArtifact) class_name = "ArtifactError";
  if (fault.error_class == Fault::Class::kDriver) {
    class_name = "DriverError";
    arguments["code"] = fault.code;
    arguments["name"] = fault.name;
  }
  nb::object error_class = errors.attr(class_name);
  nb::object error = error_class(nb::str(fault.what()), **arguments);
  PyErr_SetObject(error_class.ptr(), error.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Fault& fault) {
    try {
      raise_fault(fault);
    } catch (nb::python_error& error) {
      error.restore();
    }
  }
}

// The words that a manifest may use, for the checks in Python.
template <size_t size>
nb::tuple names(const std::array<std::string_view, size>& list) {
  nb::list result;
  for (const std::string_view name : list) result.append(nb::str(name.data(), name.size()));
  return nb::tuple(result);
}

}  // namespace

NB_MODULE(_core, m) {
  nb::register_exception_translator(translate);
  m.attr("BUFFERS") = names(kBuffers);
  m.attr("SYMBOLS") = names(kSymbols);
  m.attr("STATE_BYTES") = kStateBytes;
  m.attr("SCALE_OFFSET") = kScaleOffset;
  m.attr("COUNTERS_OFFSET") = kCountersOffset;
  m.attr("COUNTER_BYTES") = kFlagsOffset - kCountersOffset;
  m.attr("FLAGS_OFFSET") = kFlagsOffset;

  nb::class_<Driver>(m, "Driver")
      .def(nb::init<const std::string&>(), "path"_a)
      .def_prop_ro("version", &Driver::version)
      .def("device_count", &Driver::device_count);

  nb::class_<Device>(m, "Device")
      .def(nb::init<std::shared_ptr<const Driver>, int>(), "driver"_a, "ordinal"_a)
      .def_prop_ro("ordinal", &Device::ordinal)
      .def_prop_ro("name", &Device::name)
      .def_prop_ro("capability",
                   [](const Device& self) { return nb::make_tuple(self.major(), self.minor()); })
      .def_prop_ro("sms", &Device::sms);

  nb::class_<Context>(m, "Context")
      .def(nb::init<std::shared_ptr<const Device>>(), "device"_a)
      .def(
          "capturing",
          [](const Context& self, uint64_t stream) {
            return self.explaining([&] {
              const ContextScope scope(self);
              return capture_id(self.driver(), stream_of(stream)) != 0;
            });
          },
          "stream"_a)
      .def_prop_ro("status", [](const Context& self) {
        const volatile uint32_t* words = self.status();
        return std::array<uint32_t, 4>{words[0], words[1], words[2], words[3]};
      });

  nb::class_<Param>(m, "Param")
      .def(nb::init<const std::string&, const std::string&, const std::string&,
                    const std::vector<std::variant<int64_t, std::string>>&, const std::vector<int64_t>&,
                    const std::vector<int64_t>&, int, int64_t>(),
           "name"_a, "kind"_a, "dtype"_a, "dims"_a, "strides"_a, "box"_a, "swizzle"_a, "size"_a);

  nb::class_<Kernel>(m, "Kernel")
      .def(
          "__init__",
          [](Kernel* self, std::shared_ptr<const Context> context, nb::bytes image, std::string name,
             std::string entry, unsigned threads, unsigned smem_bytes, std::array<unsigned, 3> cluster,
             bool cooperative, bool programmatic, std::array<int64_t, 3> grid, std::vector<Param> params) {
            new (self) Kernel(std::move(context), std::string(image.c_str(), image.size()),
                              {std::move(name),
                               std::move(entry),
                               threads,
                               smem_bytes,
                               cluster,
                               cooperative,
                               programmatic,
                               {grid[0], grid[1], grid[2]},
                               std::move(params)});
          },
          "context"_a, "image"_a, "name"_a, "entry"_a, "threads"_a, "smem_bytes"_a, "cluster"_a,
          "cooperative"_a, "programmatic"_a, "grid"_a, "params"_a)
      .def_prop_ro("name", [](const Kernel& self) { return self.spec().name; })
      .def("ctas", &Kernel::ctas, "m"_a)
      .def_prop_ro("max_ctas", &Kernel::max_ctas);

  nb::class_<Ring>(m, "Ring")
      .def(
          "__init__",
          [](Ring* self, std::shared_ptr<const Context> context, size_t data_bytes, uint64_t stream,
             bool shared) { new (self) Ring(std::move(context), data_bytes, stream_of(stream), shared); },
          "context"_a, "data_bytes"_a, "stream"_a, "shared"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("data_bytes", &Ring::data_bytes)
      .def_prop_ro("bytes", &Ring::bytes)
      .def_prop_ro("data", &Ring::data)
      .def_prop_ro("state", &Ring::state);

  nb::class_<Sequence>(m, "Sequence")
      .def(nb::init<const Sequence::Kernels&, const Sequence::Kernels&, const Sequence::Kernels&, int64_t,
                    int64_t, int64_t, int64_t>(),
           "reduce"_a, "whole"_a, "each_chunk"_a, "capacity_rows"_a, "q_row_bytes"_a, "sf_row_bytes"_a,
           "y_row_bytes"_a)
      .def(
          "run",
          [](Sequence& self, Ring* ring, uint64_t stream, int64_t rows, int64_t x_stride, int32_t rule,
             uint64_t x, uint64_t scale, uint64_t w, uint64_t w_sf, uint64_t w_scale, uint64_t bias,
             uint64_t y, uint64_t packed, uint64_t slots, uint64_t state, uint64_t partials) {
            self.run({stream_of(stream), rows, x_stride, rule, x, scale, w, w_sf, w_scale, bias, y, packed,
                      slots, state, partials},
                     ring);
          },
          "ring"_a.none(), "stream"_a, "m"_a, "x_stride"_a = 0, "rule"_a = 0, "x"_a = 0, "scale"_a = 0,
          "w"_a = 0, "w_sf"_a = 0, "w_scale"_a = 0, "bias"_a = 0, "y"_a = 0, "packed"_a = 0, "slots"_a = 0,
          "state"_a = 0, "partials"_a = 0, nb::call_guard<nb::gil_scoped_release>());
}
