/* dsl_host.c: the few CUDA runtime calls of a kernel's host function, recording the launch.
 *
 * Linked with the object that CuTe DSL's exporter writes for a kernel. No GPU and no CUDA
 * library is involved: what is left to observe is what the DSL itself would launch.
 */
#include <stddef.h>
#include <string.h>

enum { ATTRIBUTE_SMEM_LIMIT = 97, SMEM_LIMIT = 232448, MAX_PARAMS = 32, MAX_ATTRIBUTES = 8 };

typedef struct {
  int id;
  char pad[4];
  unsigned value[16];
} Attribute;

typedef struct {
  unsigned grid[3], block[3];
  size_t smem;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
} LaunchConfig;

/* Set by the test: bytes of each kernel parameter. */
int param_sizes[MAX_PARAMS], param_count;

/* The last launch. */
unsigned launches, grid[3], block[3], attribute_count;
size_t smem;
Attribute attributes[MAX_ATTRIBUTES];
unsigned char params[MAX_PARAMS * 128];

int _cudaLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e,
                         unsigned f) {
  (void)code, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  *library = params;
  return 0;
}

int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  (void)library, (void)name;
  *kernel = params;
  return 0;
}

int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int _cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == ATTRIBUTE_SMEM_LIMIT ? SMEM_LIMIT : 0;
  return 0;
}

int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  *value = 0;
  return 0;
}

int _cudaFuncSetAttribute(void* function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return 0;
}

int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  return 0;
}

int _cudaLaunchKernelEx(LaunchConfig* config, void* function, void** arguments) {
  (void)function;
  ++launches;
  memcpy(grid, config->grid, sizeof grid);
  memcpy(block, config->block, sizeof block);
  smem = config->smem;
  attribute_count = config->attribute_count;
  if (attribute_count > MAX_ATTRIBUTES) return 1;
  memcpy(attributes, config->attributes, attribute_count * sizeof(Attribute));
  unsigned char* at = params;
  for (int i = 0; i < param_count; at += param_sizes[i++]) memcpy(at, arguments[i], param_sizes[i]);
  return 0;
}
