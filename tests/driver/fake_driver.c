/* fake_driver.c: a libcuda.so.1 that records what it is asked for and fails when told to.
 *
 * The real extension runs against it on a machine without a GPU. A "cubin" is the text
 * "FAKE entry size size ...", the bytes of each kernel parameter. A tensor map holds its base
 * address, so that the parameters of a launch can be logged readably. The few structures are
 * declared here as the driver API lays them out, since cuda.h may not be installed.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  NOT_FOUND = 500
};
enum { ATTRIBUTE_SMS = 16, ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76 };
enum { LAUNCH_COOPERATIVE = 2, LAUNCH_CLUSTER = 4, LAUNCH_PROGRAMMATIC = 6 };
enum { MAX_STREAMS = 64, MAX_PARAMS = 64, LOG_BYTES = 1 << 22 };

typedef struct {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int cooperative;
    int programmatic;
  } value;
} LaunchAttribute;

typedef struct {
  unsigned grid[3], block[3], smem;
  uintptr_t stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
} LaunchConfig;

typedef struct {
  char entry[128];
  int sizes[MAX_PARAMS], params;
} Module;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[LOG_BYTES];
static size_t log_used;
static struct {
  char call[64];
  int countdown, code;
} failure;
static char hidden[64];
static int version, devices, major, minor;
static int live_memory, live_modules, live_events, live_contexts, live_host;
static uintptr_t next_address, next_handle;
static struct {
  uintptr_t stream;
  uint64_t id;
} captures[MAX_STREAMS];
static int event_pending;
static __thread uintptr_t current_context;
static __thread int capture_mode;

/* Logs a call; returns the code that it is to fail with, or 0. */
static int record(const char* call, const char* format, ...) {
  pthread_mutex_lock(&lock);
  va_list arguments;
  va_start(arguments, format);
  size_t room = LOG_BYTES - log_used;
  if (room > 4096) {
    log_used += snprintf(log_text + log_used, room, "%s ", call);
    log_used += vsnprintf(log_text + log_used, LOG_BYTES - log_used, format, arguments);
    log_text[log_used++] = '\n';
    log_text[log_used] = 0;
  }
  va_end(arguments);
  int code = 0;
  if (strcmp(failure.call, call) == 0 && failure.countdown > 0 && --failure.countdown == 0)
    code = failure.code;
  pthread_mutex_unlock(&lock);
  return code;
}

#ifdef SILENT  // a driver that does nothing, for the benchmark of what calls it
#define RECORD(...)
#else
#define RECORD(...)                               \
  do {                                            \
    int code = record(__func__ + 5, __VA_ARGS__); \
    if (code) return code;                        \
  } while (0)
#endif

/* What a test controls; names without the prefix are the driver's. */

__attribute__((constructor)) void fake_reset(void) {
  log_used = 0;
  log_text[0] = 0;
  memset(&failure, 0, sizeof failure);
  hidden[0] = 0;
  version = 13000;
  devices = 1;
  major = 12;
  minor = 1;
  event_pending = 0;
  next_address = next_address ? next_address : 0x700000000000;
  next_handle = next_handle ? next_handle : 0x1000;
  memset(captures, 0, sizeof captures);
}
const char* fake_log(void) { return log_text; }
void fake_clear_log(void) {
  log_used = 0;
  log_text[0] = 0;
}
/* The nth call from now on fails, once. */
void fake_fail(const char* call, int nth, int code) {
  snprintf(failure.call, sizeof failure.call, "%s", call);
  failure.countdown = nth;
  failure.code = code;
}
void fake_hide(const char* symbol) { snprintf(hidden, sizeof hidden, "%s", symbol); }
void fake_set_version(int value) { version = value; }
void fake_set_devices(int count) { devices = count; }
void fake_set_capability(int new_major, int new_minor) {
  major = new_major;
  minor = new_minor;
}
void fake_set_event_pending(int pending) { event_pending = pending; }
void fake_set_capture(uintptr_t stream, uint64_t id) {
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (captures[i].stream == stream || captures[i].id == 0) {
      captures[i].stream = stream;
      captures[i].id = id;
      return;
    }
  }
}
int fake_live(const char* what) {
  if (strcmp(what, "memory") == 0) return live_memory;
  if (strcmp(what, "modules") == 0) return live_modules;
  if (strcmp(what, "events") == 0) return live_events;
  if (strcmp(what, "contexts") == 0) return live_contexts;
  return live_host;
}

/* The driver. */

static int fake_cuInit(unsigned flags) {
  RECORD("flags=%u", flags);
  return devices ? SUCCESS : 100;
}
static int fake_cuGetErrorName(int code, const char** name) {
  static const struct {
    int code;
    const char* name;
  } names[] = {{1, "CUDA_ERROR_INVALID_VALUE"},       {2, "CUDA_ERROR_OUT_OF_MEMORY"},
               {100, "CUDA_ERROR_NO_DEVICE"},         {200, "CUDA_ERROR_INVALID_IMAGE"},
               {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"}, {500, "CUDA_ERROR_NOT_FOUND"},
               {719, "CUDA_ERROR_LAUNCH_FAILED"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
    if (names[i].code == code) {
      *name = names[i].name;
      return SUCCESS;
    }
  }
  return INVALID_VALUE;
}
static int fake_cuGetErrorString(int code, const char** text) {
  (void)code;
  *text = "as told";
  return SUCCESS;
}
static int fake_cuDeviceGetCount(int* count) {
  RECORD("");
  *count = devices;
  return SUCCESS;
}
static int fake_cuDeviceGet(int* device, int ordinal) {
  RECORD("ordinal=%d", ordinal);
  if (ordinal >= devices) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}
static int fake_cuDeviceGetName(char* name, int size, int device) {
  RECORD("device=%d", device);
  snprintf(name, size, "Fake GPU %d", device);
  return SUCCESS;
}
static int fake_cuDeviceGetAttribute(int* value, int attribute, int device) {
  RECORD("attribute=%d device=%d", attribute, device);
  *value = attribute == ATTRIBUTE_SMS     ? 48
           : attribute == ATTRIBUTE_MAJOR ? major
           : attribute == ATTRIBUTE_MINOR ? minor
                                          : 0;
  return SUCCESS;
}
static int fake_cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  RECORD("device=%d", device);
  *context = 0xC000 + device;
  ++live_contexts;
  return SUCCESS;
}
static int fake_cuDevicePrimaryCtxRelease(int device) {
  RECORD("device=%d", device);
  --live_contexts;
  return SUCCESS;
}
static int fake_cuCtxGetCurrent(uintptr_t* context) {
  *context = current_context;
  return record("cuCtxGetCurrent", "");
}
static int fake_cuCtxPushCurrent(uintptr_t context) {
  RECORD("context=%#lx", context);
  current_context = context;
  return SUCCESS;
}
static int fake_cuCtxPopCurrent(uintptr_t* context) {
  RECORD("");
  *context = current_context;
  current_context = 0;
  return SUCCESS;
}

static int fake_cuCtxSynchronize(void) {
  RECORD("");
  return SUCCESS;
}

static int fake_cuModuleLoadData(Module** module, const char* image) {
  RECORD("");
  Module* loaded = calloc(1, sizeof *loaded);
  int used = 0;
  if (sscanf(image, "FAKE %127s%n", loaded->entry, &used) != 1) {
    free(loaded);
    return INVALID_IMAGE;
  }
  for (const char* at = image + used; loaded->params < MAX_PARAMS; ++loaded->params, at += used) {
    if (sscanf(at, "%d%n", &loaded->sizes[loaded->params], &used) != 1) break;
  }
  ++live_modules;
  *module = loaded;
  return SUCCESS;
}
static int fake_cuModuleUnload(Module* module) {
  RECORD("%s", module->entry);
  --live_modules;
  free(module);
  return SUCCESS;
}
static int fake_cuModuleGetFunction(Module** function, Module* module, const char* name) {
  RECORD("name=%s", name);
  *function = module;
  return strcmp(name, module->entry) ? NOT_FOUND : SUCCESS;
}
static int fake_cuFuncLoad(Module* function) {
  RECORD("%s", function->entry);
  return SUCCESS;
}
static int fake_cuFuncSetAttribute(Module* function, int attribute, int value) {
  RECORD("%s attribute=%d value=%d", function->entry, attribute, value);
  return SUCCESS;
}
static int fake_cuFuncGetParamInfo(Module* function, size_t index, size_t* offset, size_t* size) {
  if (index >= (size_t)function->params) return INVALID_VALUE;
  *offset = 0;
  *size = function->sizes[index];
  return SUCCESS;
}

static void list(char* out, size_t room, unsigned count, const uint64_t* wide, const uint32_t* narrow) {
  size_t used = 0;
  out[0] = 0;
  for (unsigned i = 0; i < count; ++i) {
    unsigned long long value = wide ? wide[i] : narrow[i];
    used += snprintf(out + used, room - used, "%s%llu", i ? "," : "", value);
  }
}
static int fake_cuTensorMapEncodeTiled(uint64_t* map, int dtype, unsigned rank, uintptr_t base,
                                       const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                       const uint32_t* steps, int interleave, int swizzle, int promotion,
                                       int fill) {
  char dim_text[128], stride_text[128], box_text[128];
  (void)steps, (void)promotion, (void)fill;
  list(dim_text, sizeof dim_text, rank, dims, NULL);
  list(stride_text, sizeof stride_text, rank - 1, strides, NULL);
  list(box_text, sizeof box_text, rank, NULL, box);
  RECORD("dtype=%d base=%#lx dims=%s strides=%s box=%s interleave=%d swizzle=%d", dtype, base, dim_text,
         stride_text, box_text, interleave, swizzle);
  map[0] = base;
  return (uintptr_t)map % 64 || base % 16 ? INVALID_VALUE : SUCCESS;
}
static int fake_cuLaunchKernelEx(const LaunchConfig* config, Module* function, void** params, void** extra) {
#ifdef SILENT
  return SUCCESS;
#endif
  char text[2048] = "";
  size_t used = 0;
  unsigned cluster = 1;
  int cooperative = 0;
  int programmatic = 0;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const LaunchAttribute* attribute = &config->attributes[i];
    if (attribute->id == LAUNCH_CLUSTER) cluster = attribute->value.cluster.x;
    if (attribute->id == LAUNCH_COOPERATIVE) cooperative = attribute->value.cooperative;
    if (attribute->id == LAUNCH_PROGRAMMATIC) programmatic = attribute->value.programmatic;
  }
  for (int i = 0; i < function->params && !extra; ++i) {
    char* out = text + used;
    size_t room = sizeof text - used;
    const char* comma = i ? "," : "";
    switch (function->sizes[i]) {
      case 4:
        used += snprintf(out, room, "%s%d", comma, *(int*)params[i]);
        break;
      case 8:
        used += snprintf(out, room, "%s%#lx", comma, *(unsigned long*)params[i]);
        break;
      case 128:
        used += snprintf(out, room, "%smap:%#lx", comma, *(unsigned long*)params[i]);
        break;
      default:
        used += snprintf(out, room, "%sunread", comma);
    }
  }
  RECORD(
      "%s grid=%u block=%u smem=%u stream=%#lx cluster=%u cooperative=%d programmatic=%d context=%#lx "
      "params=%s",
      function->entry, config->grid[0], config->block[0], config->smem, config->stream, cluster, cooperative,
      programmatic, current_context, text);
  return SUCCESS;
}

static int fake_cuMemAlloc(uintptr_t* address, size_t bytes) {
  RECORD("bytes=%zu mode=%d", bytes, capture_mode);
  *address = next_address;
  next_address += (bytes + 511) / 512 * 512;
  ++live_memory;
  return SUCCESS;
}
static int fake_cuMemFree(uintptr_t address) {
  RECORD("address=%#lx", address);
  --live_memory;
  return SUCCESS;
}
static int fake_cuMemsetD8Async(uintptr_t address, unsigned char value, size_t bytes, uintptr_t stream) {
  RECORD("address=%#lx value=%u bytes=%zu stream=%#lx", address, value, bytes, stream);
  return SUCCESS;
}
static int fake_cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  RECORD("bytes=%zu flags=%u", bytes, flags);
  *address = malloc(bytes);
  ++live_host;
  return SUCCESS;
}
static int fake_cuMemFreeHost(void* address) {
  RECORD("");
  free(address);
  --live_host;
  return SUCCESS;
}
static int fake_cuEventCreate(uintptr_t* event, unsigned flags) {
  RECORD("flags=%u", flags);
  *event = next_handle++;
  ++live_events;
  return SUCCESS;
}
static int fake_cuEventDestroy(uintptr_t event) {
  RECORD("event=%#lx", event);
  --live_events;
  return SUCCESS;
}
static int fake_cuEventRecord(uintptr_t event, uintptr_t stream) {
  RECORD("event=%#lx stream=%#lx", event, stream);
  return SUCCESS;
}
static int fake_cuEventQuery(uintptr_t event) {
  RECORD("event=%#lx", event);
  return event_pending ? 600 : SUCCESS;
}
static int fake_cuEventSynchronize(uintptr_t event) {
  RECORD("event=%#lx", event);
  return SUCCESS;
}
static int fake_cuStreamWaitEvent(uintptr_t stream, uintptr_t event, unsigned flags) {
  RECORD("stream=%#lx event=%#lx flags=%u", stream, event, flags);
  return SUCCESS;
}
static int fake_cuStreamGetCaptureInfo(uintptr_t stream, int* status, uint64_t* id) {
  RECORD("stream=%#lx", stream);
  *status = 0;
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (captures[i].id && captures[i].stream == stream) *status = 1, *id = captures[i].id;
  }
  return SUCCESS;
}
static int fake_cuThreadExchangeStreamCaptureMode(int* mode) {
  int previous = capture_mode;
  capture_mode = *mode;
  *mode = previous;
  return SUCCESS;
}

#define ENTRY(name) {#name, (void*)fake_##name}
static const struct {
  const char* name;
  void* function;
} table[] = {ENTRY(cuInit),
             ENTRY(cuGetErrorName),
             ENTRY(cuGetErrorString),
             ENTRY(cuDeviceGetCount),
             ENTRY(cuDeviceGet),
             ENTRY(cuDeviceGetName),
             ENTRY(cuDeviceGetAttribute),
             ENTRY(cuDevicePrimaryCtxRetain),
             ENTRY(cuDevicePrimaryCtxRelease),
             ENTRY(cuCtxGetCurrent),
             ENTRY(cuCtxPushCurrent),
             ENTRY(cuCtxPopCurrent),
             ENTRY(cuCtxSynchronize),
             ENTRY(cuModuleLoadData),
             ENTRY(cuModuleUnload),
             ENTRY(cuModuleGetFunction),
             ENTRY(cuFuncLoad),
             ENTRY(cuFuncSetAttribute),
             ENTRY(cuFuncGetParamInfo),
             ENTRY(cuTensorMapEncodeTiled),
             ENTRY(cuLaunchKernelEx),
             ENTRY(cuMemAlloc),
             ENTRY(cuMemFree),
             ENTRY(cuMemsetD8Async),
             ENTRY(cuMemHostAlloc),
             ENTRY(cuMemFreeHost),
             ENTRY(cuEventCreate),
             ENTRY(cuEventDestroy),
             ENTRY(cuEventRecord),
             ENTRY(cuEventQuery),
             ENTRY(cuEventSynchronize),
             ENTRY(cuStreamWaitEvent),
             ENTRY(cuStreamGetCaptureInfo),
             ENTRY(cuThreadExchangeStreamCaptureMode)};

int cuDriverGetVersion(int* value) {
  *value = version;
  return SUCCESS;
}
int cuGetProcAddress_v2(const char* symbol, void** function, int wanted, uint64_t flags, void* status) {
  (void)flags, (void)status;
  if (strcmp(symbol, hidden) == 0 || wanted > version) return NOT_FOUND;
  for (size_t i = 0; i < sizeof table / sizeof *table; ++i) {
    if (strcmp(symbol, table[i].name) == 0) {
      *function = table[i].function;
      return SUCCESS;
    }
  }
  return NOT_FOUND;
}
