// libcuda, libcublas, libcublasLt and libcupti: the few functions whose answers matter. Each library is
// built from this file with one of CUDA, CUBLAS, CUBLASLT, CUPTI defined; all its other functions are
// stubs that return success, made by build.py from what PyTorch's libraries import.

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

extern "C" {

#if defined(CUDA)
#include <dlfcn.h>
// The driver. Contexts are the runtime's.
int software_gpu_not_supported() { return 801; }
static int has_context(int device) {
  static int (*f)(int) = (int (*)(int))dlsym(RTLD_DEFAULT, "software_gpu_has_context");
  return f ? f(device) : 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = has_context(device);
  return 0;
}
int cuGetErrorString(int e, const char** out) { return *out = e ? "an error of the software GPU" : "no error", 0; }
int cuGetErrorName(int e, const char** out) { return *out = e ? "CUDA_ERROR" : "CUDA_SUCCESS", 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDriverGetVersion(int* v) { return *v = 13000, 0; }
int cuDeviceGetAttribute(int* v, int attribute, int device) {
  static int (*f)(int*, int, int) = (int (*)(int*, int, int))dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute");
  return f ? f(v, attribute, device) : 801;
}
static int context_of_thread;
int cuCtxGetCurrent(void** out) { return *out = &context_of_thread, 0; }
int cuMemCreate() { return 801; }
int cuMemAddressReserve() { return 801; }
int cuMulticastCreate() { return 801; }
int cuLaunchKernel() { return 0; }
// For Triton, whose kernels are compiled by the real ptxas and, as all others, not run.
int cuLaunchKernelEx() { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDevicePrimaryCtxRetain(void** out, int) { return *out = &context_of_thread, 0; }
int cuCtxGetLimit(size_t* value, int) { return *value = size_t(1) << 20, 0; }
int cuCtxSetLimit(int, size_t) { return 0; }
int cuModuleLoadData(void** module, const void*) { return *module = calloc(1, 64), 0; }
int cuModuleGetFunction(void** function, void* module, const char*) { return *function = module, 0; }
int cuFuncGetAttribute(int* v, int attribute, void*) {
  return *v = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, 0;  // threads of a block; registers
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncSetCacheConfig(void*, int) { return 0; }
int cuOccupancyMaxActiveClusters(int* n, void*, const void*) { return *n = 16, 0; }
int cuTensorMapEncodeTiled() { return 0; }
int cuPointerGetAttribute(void* out, int attribute, unsigned long long p) {  // 3: where a kernel finds it
  return attribute == 3 ? (*(unsigned long long*)out = p, 0) : 801;
}

#elif defined(CUBLAS)
struct Handle {
  void* stream;
  int mode;
  int pointers;
};
int cublasCreate_v2(Handle** out) { return *out = (Handle*)calloc(1, sizeof(Handle)), 0; }
int cublasDestroy_v2(Handle* h) { return free(h), 0; }
int cublasSetStream_v2(Handle* h, void* s) { return h->stream = s, 0; }
int cublasGetMathMode(Handle* h, int* mode) { return *mode = h->mode, 0; }
int cublasSetMathMode(Handle* h, int mode) { return h->mode = mode, 0; }
int cublasGetPointerMode_v2(Handle* h, int* mode) { return *mode = h->pointers, 0; }
int cublasSetPointerMode_v2(Handle* h, int mode) { return h->pointers = mode, 0; }

#elif defined(CUBLASLT)
struct Result {  // cublasLtMatmulHeuristicResult_t
  unsigned long long algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int asked, Result results[],
                                   int* found) {
  memset(results, 0, sizeof *results * size_t(asked));
  return *found = asked > 0, 0;
}
static int made(void** out) { return *out = calloc(1, 256), 0; }
int cublasLtMatmulDescCreate(void** d, int, int) { return made(d); }
int cublasLtMatmulDescDestroy(void* d) { return free(d), 0; }
int cublasLtMatmulPreferenceCreate(void** p) { return made(p); }
int cublasLtMatmulPreferenceDestroy(void* p) { return free(p), 0; }
int cublasLtMatrixLayoutCreate(void** l, int, unsigned long long, unsigned long long, long long) { return made(l); }
int cublasLtMatrixLayoutDestroy(void* l) { return free(l), 0; }
size_t cublasLtGetVersion() { return 130100; }

#elif defined(CUPTI)
// No profiler: Kineto then leaves GPU activity out.
int cuptiSubscribe() { return 15; }
int cuptiGetVersion(unsigned* v) { return *v = 130000, 0; }
int cuptiGetResultString(int, const char** out) { return *out = "not available", 0; }
int cuptiActivityGetNextRecord() { return 12; }
#endif
}
