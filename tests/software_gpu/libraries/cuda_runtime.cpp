// libcudart: devices, memory, streams, events and launches of a GPU that is not there.
//
// Copies and fills are done; kernels are counted and not run, but for the one that fills a tensor with a
// value. Device time is virtual: each launch and copy takes its stream a set time, and who waits for an
// event or a stream sleeps until then. With SOFTWARE_GPU_LAZY=1 whatever a stream may do later is done as late
// as CUDA allows it, so that a host that does not wait sees what it should not.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "hardware.h"

using namespace software_gpu;

namespace {

constexpr size_t kGrain = size_t(2) << 20;  // of the driver's allocations
constexpr size_t kPage = 4096;

struct Stream {
  int device;
  int priority = 0;
  unsigned flags = 0;
  uint64_t free_at_ns = 0;
  uint64_t queued = 0, done = 0;
  std::deque<std::function<void()>> later;
};

struct Event {
  int device = 0;
  unsigned flags = 0;
  bool recorded = false;
  uint64_t at_ns = 0;
  Stream* stream = nullptr;
  uint64_t up_to = 0;
  int polls = 0;
};

struct Pinned {
  size_t size;
  bool registered;
};

struct Device {
  Stream standard;
  bool context = false;
  std::map<uintptr_t, size_t> live;  // allocations
  std::map<uintptr_t, size_t> free;  // gaps between them
};

std::recursive_mutex mutex_;
using Lock = std::lock_guard<std::recursive_mutex>;
Device devices[kMaxDevices];
std::vector<int> visible;  // device numbers of this process -> of the machine
std::map<uintptr_t, Pinned> pinned;
std::unordered_map<const void*, const char*> kernel_names;  // the names are the library's own
std::unordered_map<const void*, std::pair<size_t, void*>> symbols;
int started_by = 0;
bool lazy = false;
uint64_t kernel_ns = 5000;
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

bool verbose() {
  static bool v = env("SOFTWARE_GPU_TRACE", 0) != 0;
  return v;
}

cudaError_t fail(cudaError_t e, const char* where) {
  last = e;
  if (e != cudaErrorNotReady) {
    count(kFailures, 1);
    if (verbose()) fprintf(stderr, "software GPU: %s: %s\n", where, cudaGetErrorString(e));
  }
  return e;
}
#define FAIL(e) return fail(e, __func__)

void read_visible() {
  visible.clear();
  int total = device_total();
  const char* given = getenv("CUDA_VISIBLE_DEVICES");
  if (!given) {
    for (int i = 0; i < total; ++i) visible.push_back(i);
    return;
  }
  std::string rest = given;
  while (!rest.empty()) {
    auto comma = rest.find(',');
    std::string name = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    int found = -1;
    if (name.rfind("GPU-", 0) == 0 || (name.rfind("MIG-", 0) == 0 && has_mig())) {
      int fitting = 0;
      for (int i = 0; i < total; ++i) {
        std::string uuid = name[0] == 'G' ? gpu_uuid(i) : mig_uuid(i);
        if (uuid.rfind(name, 0) == 0) found = i, ++fitting;
      }
      if (fitting > 1) found = -1;  // a shortened UUID must say which GPU it is
    } else if (!name.empty() && isdigit((unsigned char)name[0])) {
      found = atoi(name.c_str());
    }
    if (found < 0 || found >= total) break;  // CUDA ignores what follows a name that it does not know
    if (std::count(visible.begin(), visible.end(), found)) {  // a device named twice: none is seen
      visible.clear();
      break;
    }
    visible.push_back(found);
  }
}

// The driver starts with a process's first call; a fork of it cannot use it.
cudaError_t begin() {
  Lock lock(mutex_);
  int pid = getpid();
  if (started_by == pid) return visible.empty() ? cudaErrorNoDevice : cudaSuccess;
  if (started_by != 0) return cudaErrorInitializationError;
  if (long code = env("SOFTWARE_GPU_START_ERROR", 0)) return cudaError_t(code);  // no driver, or too old a one
  started_by = pid;
  lazy = env("SOFTWARE_GPU_LAZY", 0) != 0;
  kernel_ns = uint64_t(env("SOFTWARE_GPU_KERNEL_NS", 5000));
  read_visible();
  for (size_t i = 0; i < visible.size(); ++i) {
    uintptr_t base = kDeviceBase + uintptr_t(visible[i]) * kDeviceSpan;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void* a = mmap((void*)base, kDeviceSpan, PROT_NONE, flags, -1, 0);
    void* b = mmap((void*)(base + kShadow), kDeviceSpan, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (a == MAP_FAILED || b == MAP_FAILED) {
      perror("software GPU: reserve");
      return cudaErrorMemoryAllocation;
    }
    madvise(b, kDeviceSpan, MADV_DONTFORK);
    madvise(b, kDeviceSpan, MADV_NOHUGEPAGE);
    devices[i].standard.device = int(i);
    devices[i].free[base + kGrain] = kDeviceSpan - kGrain;
  }
  return visible.empty() ? cudaErrorNoDevice : cudaSuccess;
}
#define BEGIN()                                \
  if (cudaError_t e_ = begin(); e_ != cudaSuccess) FAIL(e_)

// The number of a device of this process among the machine's.
int number_of(int device) { return visible[size_t(device)]; }

cudaError_t context(int device) {
  if (!devices[device].context) {
    auto& mine = me()->used_bytes[number_of(device)];
    mine += context_bytes();
    if (used_bytes(number_of(device)) > capacity_bytes()) {
      mine -= context_bytes();
      return cudaErrorMemoryAllocation;
    }
    devices[device].context = true;
  }
  return cudaSuccess;
}
// A GPU that breaks while it is used: from then on this process's calls on it fail, all in the same way.
cudaError_t broken(int device) {
  static const Fault f = fault_of("SOFTWARE_GPU_FAULT");
  if (f.part < 0 || number_of(device) != f.part || me()->count[kLaunches] < f.after) return cudaSuccess;
  return cudaError_t(atoi(f.kind));
}
#define CONTEXT()                                                         \
  BEGIN();                                                                \
  Lock lock_(mutex_);                                                     \
  if (cudaError_t e_ = context(current); e_ != cudaSuccess) FAIL(e_);     \
  if (cudaError_t e_ = broken(current); e_ != cudaSuccess) FAIL(e_)

Stream* of(cudaStream_t s) {
  auto handle = reinterpret_cast<uintptr_t>(s);
  return handle <= 2 ? &devices[current].standard : reinterpret_cast<Stream*>(s);
}

void run_up_to(Stream* s, uint64_t up_to) {
  while (s->done < up_to && !s->later.empty()) {
    auto op = std::move(s->later.front());
    s->later.pop_front();
    op();
    s->done++;
  }
}

uint64_t spend(Stream* s, uint64_t ns) {
  s->free_at_ns = std::max(now_ns(), s->free_at_ns) + ns;
  machine()->busy_ns[number_of(s->device)] += int64_t(ns);
  return s->free_at_ns;
}

void enqueue(Stream* s, uint64_t ns, bool may_wait, std::function<void()> op) {
  spend(s, ns);
  s->queued++;
  s->later.push_back(std::move(op));
  if (!lazy || !may_wait) run_up_to(s, s->queued);
}

void sleep_until(uint64_t at_ns) {
  timespec t{time_t(at_ns / 1000000000ull), long(at_ns % 1000000000ull)};
  if (at_ns > now_ns())
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
    }
}

std::vector<Stream*>& streams() {
  static std::vector<Stream*> all;
  return all;
}

uint64_t drain(int device) {
  uint64_t at = devices[device].standard.free_at_ns;
  run_up_to(&devices[device].standard, UINT64_MAX);
  for (Stream* s : streams())
    if (s->device == device) {
      run_up_to(s, UINT64_MAX);
      at = std::max(at, s->free_at_ns);
    }
  return at;
}

const std::pair<const uintptr_t, Pinned>* pinned_at(const void* p) {
  auto a = reinterpret_cast<uintptr_t>(p);
  auto it = pinned.upper_bound(a);
  if (it == pinned.begin()) return nullptr;
  --it;
  return a < it->first + it->second.size ? &*it : nullptr;
}

int local_device(const void* p) {
  int m = device_of(p);
  for (size_t i = 0; i < visible.size(); ++i)
    if (visible[i] == m) return int(i);
  return -1;
}

bool is_live(const void* p, size_t n) {
  int d = local_device(p);
  if (d < 0) return false;
  auto a = reinterpret_cast<uintptr_t>(p);
  auto it = devices[d].live.upper_bound(a);
  if (it == devices[d].live.begin()) return false;
  --it;
  return a + n <= it->first + it->second;
}

void clear(char* at, size_t n) {  // zero; whole pages are given back instead
  auto a = reinterpret_cast<uintptr_t>(at);
  uintptr_t first = (a + kPage - 1) / kPage * kPage, last_page = (a + n) / kPage * kPage;
  if (n < (1u << 20) || last_page <= first) {
    memset(at, 0, n);
    return;
  }
  memset(at, 0, first - a);
  madvise((void*)first, last_page - first, MADV_DONTNEED);
  memset((void*)last_page, 0, a + n - last_page);
}

cudaError_t copy(void* dst, const void* src, size_t n, Stream* s, bool blocks) {
  if (n == 0) return cudaSuccess;
  bool to = is_device(dst), from = is_device(src);
  if ((to && !is_live(dst, n)) || (from && !is_live(src, n))) return cudaErrorInvalidValue;
  count(to ? (from ? kD2D : kH2D) : (from ? kD2H : kHost), int64_t(n));
  bool may_wait = !blocks && (to || pinned_at(dst)) && (from || pinned_at(src));
  uint64_t ns = uint64_t(double(n) / (to && from ? 1000.0 : 20.0)) + 1000;
  enqueue(s, ns, may_wait, [=] { memmove(storage((char*)dst), storage((const char*)src), n); });
  // Pageable memory: the host goes on when it may touch it again.
  if (blocks || (from && !may_wait)) sleep_until(s->free_at_ns);
  return cudaSuccess;
}

void note_pinned(int64_t n) {
  auto& c = me()->count;
  int64_t now = (c[kPinnedNow] += n);
  if (now > c[kPinnedPeak]) c[kPinnedPeak] = now;
}

// The only kernel that is run: every element of a contiguous tensor becomes one value.
bool fill(const char* name, void** args, Stream* s) {
  static const char* functor = "FillFunctorI";
  const char* at = strstr(name, functor);
  if (!at || !strstr(name, "vectorized_elementwise_kernel")) return false;
  static const std::map<std::string, size_t> sizes = {
      {"N3c104Half", 2}, {"N3c108BFloat16", 2}, {"N3c107complexIf", 8}, {"N3c107complexId", 16}};
  static const std::map<char, size_t> plain = {{'b', 1}, {'h', 1}, {'a', 1}, {'s', 2}, {'t', 2},
                                               {'i', 4}, {'j', 4}, {'l', 8}, {'m', 8}, {'f', 4},
                                               {'d', 8}};
  std::string type = at + strlen(functor);
  size_t width = 0;
  for (auto& [t, w] : sizes)
    if (type.rfind(t, 0) == 0) width = w;
  if (!width && plain.count(type[0])) width = plain.at(type[0]);
  if (!width) return false;
  auto n = size_t(*static_cast<int*>(args[0]));
  std::string value(static_cast<char*>(args[1]), width);
  char* target = *static_cast<char**>(args[2]);
  if (!is_live(target, n * width)) return false;
  count(kFilled, int64_t(n * width));
  enqueue(s, kernel_ns, true, [=] {
    char* to = storage(target);
    if (value.find_first_not_of('\0') == std::string::npos) return clear(to, n * width);
    for (size_t i = 0; i < n; ++i) memcpy(to + i * width, value.data(), width);
  });
  return true;
}

cudaError_t launch(const void* kernel, void** args, cudaStream_t stream) {
  CONTEXT();
  count(kLaunches, 1);
  Stream* s = of(stream);
  auto it = kernel_names.find(kernel);
  if (it == kernel_names.end()) FAIL(cudaErrorInvalidDeviceFunction);
  static const char* log = getenv("SOFTWARE_GPU_KERNELS");
  if (log) {
    FILE* f = fopen(log, "a");
    if (f) fprintf(f, "%s\n", it->second), fclose(f);
  }
  if (!fill(it->second, args, s)) spend(s, kernel_ns);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// ---- for the other libraries

void software_gpu_wait_for_stream(cudaStream_t s) {  // what a collective does first: it is run at once
  Lock lock(mutex_);
  run_up_to(of(s), UINT64_MAX);
}
void software_gpu_spend(cudaStream_t s, uint64_t ns) {
  Lock lock(mutex_);
  spend(of(s), ns);
}
int software_gpu_has_context(int device) {
  return started_by == getpid() && device >= 0 && device < kMaxDevices && devices[device].context;
}

// ---- registration of kernels and variables

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*,
                            void*, int*) {
  Lock lock(mutex_);
  kernel_names[host] = name;
}
void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
  Lock lock(mutex_);
  symbols[host] = {size, nullptr};
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, (cudaStream_t)stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) FAIL(cudaErrorMissingConfiguration);
  auto c = configurations.back();
  configurations.pop_back();
  *grid = c.grid, *block = c.block, *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** args, size_t, cudaStream_t s) {
  return launch(kernel, args, s);
}
cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void** args, size_t, cudaStream_t s) {
  return launch(f, args, s);
}
cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void** args, size_t, cudaStream_t s) {
  return launch(f, args, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** args) {
  return launch(f, args, c->stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* data) {
  CONTEXT();
  enqueue(of(s), 1000, true, [=] { f(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) {
  CONTEXT();
  enqueue(of(s), 1000, true, [=] { f(s, cudaSuccess, data); });
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  BEGIN();
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->ptxVersion = 80, a->binaryVersion = 80;
  a->maxDynamicSharedSizeBytes = 163840;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  BEGIN();
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int block, size_t) {
  BEGIN();
  *n = std::max(1, std::min(32, 2048 / std::max(block, 1)));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int block,
                                                                   size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared);
}

// ---- errors and versions

cudaError_t cudaGetLastError() {
  auto e = last;
  last = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorPeerAccessAlreadyEnabled: return "cudaErrorPeerAccessAlreadyEnabled";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorECCUncorrectable: return "cudaErrorECCUncorrectable";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorDevicesUnavailable: return "cudaErrorDevicesUnavailable";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorSystemDriverMismatch: return "cudaErrorSystemDriverMismatch";
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorSystemDriverMismatch: return "system has unsupported display driver / cuda driver combination";
    default: return "unknown error";
  }
}
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }

// ---- devices

cudaError_t cudaGetDeviceCount(int* n) {
  *n = 0;
  BEGIN();
  *n = int(visible.size());
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* d) {
  BEGIN();
  *d = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  BEGIN();
  if (d < 0 || size_t(d) >= visible.size()) FAIL(cudaErrorInvalidDevice);
  current = d;
  Lock lock(mutex_);
  if (cudaError_t e = context(d); e != cudaSuccess) FAIL(e);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  BEGIN();
  if (d < 0 || size_t(d) >= visible.size()) FAIL(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s%s", device_name(), has_mig() ? kMigProfile : "");
  unsigned char u[16];
  uuid_bytes(number_of(d) + (has_mig() ? kFirstMig : 0), u);
  memcpy(&p->uuid, u, 16);
  p->totalGlobalMem = size_t(capacity_bytes());
  p->major = int(env("SOFTWARE_GPU_MAJOR", 8)), p->minor = int(env("SOFTWARE_GPU_MINOR", 0));
  p->multiProcessorCount = 108, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 166912;
  p->sharedMemPerMultiprocessor = 167936, p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->totalConstMem = 65536;
  p->l2CacheSize = 40 << 20, p->memoryBusWidth = 5120, p->asyncEngineCount = 3;
  p->memPitch = 2147483647, p->textureAlignment = 512, p->texturePitchAlignment = 32;
  p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1;
  p->ECCEnabled = p->streamPrioritiesSupported = p->managedMemory = p->hostRegisterSupported = 1;
  p->memoryPoolsSupported = p->computePreemptionSupported = p->ipcEventSupported = 1;
  p->pciBusID = number_of(d) + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  cudaDeviceProp p;
  if (auto e = cudaGetDeviceProperties(&p, d); e != cudaSuccess) return e;
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = int(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = int(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = int(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxGridDimX: *v = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported: *v = 1; break;
    default: *v = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int n, int d) {
  BEGIN();
  snprintf(out, size_t(n), "0000:%02X:00.0", number_of(d) + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int a, int b) {
  BEGIN();
  *can = a != b;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  CONTEXT();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  BEGIN();
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  uint64_t at;
  {
    CONTEXT();
    count(kSyncs, 1);
    at = drain(current);
  }
  sleep_until(at);
  return cudaSuccess;
}

// ---- memory

cudaError_t cudaMalloc(void** out, size_t n) {
  CONTEXT();
  *out = nullptr;
  if (n == 0) return cudaSuccess;
  size_t size = (n + kGrain - 1) / kGrain * kGrain;
  Device& d = devices[current];
  auto& mine = me()->used_bytes[number_of(current)];
  mine += int64_t(size);
  if (used_bytes(number_of(current)) > capacity_bytes()) {
    mine -= int64_t(size);
    FAIL(cudaErrorMemoryAllocation);
  }
  for (auto it = d.free.begin(); it != d.free.end(); ++it) {
    if (it->second < size) continue;
    uintptr_t at = it->first;
    size_t rest = it->second - size;
    d.free.erase(it);
    if (rest) d.free[at + size] = rest;
    d.live[at] = size;
    *out = (void*)at;
    return cudaSuccess;
  }
  mine -= int64_t(size);
  FAIL(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* p) {
  CONTEXT();
  if (!p) return cudaSuccess;
  int dev = is_device(p) ? local_device(p) : -1;
  if (dev < 0) FAIL(cudaErrorInvalidValue);
  drain(dev);
  Device& d = devices[dev];
  auto it = d.live.find((uintptr_t)p);
  if (it == d.live.end()) FAIL(cudaErrorInvalidValue);
  size_t size = it->second;
  d.live.erase(it);
  madvise((void*)((uintptr_t)p + kShadow), size, MADV_DONTNEED);
  me()->used_bytes[number_of(dev)] -= int64_t(size);
  auto gap = d.free.emplace((uintptr_t)p, size).first;
  auto next = std::next(gap);
  if (next != d.free.end() && gap->first + gap->second == next->first) {
    gap->second += next->second;
    d.free.erase(next);
  }
  if (gap != d.free.begin()) {
    auto before = std::prev(gap);
    if (before->first + before->second == gap->first) {
      before->second += gap->second;
      d.free.erase(gap);
    }
  }
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** out, size_t n, cudaStream_t) { return cudaMalloc(out, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  CONTEXT();
  int64_t used = used_bytes(number_of(current));
  *total = size_t(capacity_bytes());
  *free = size_t(std::max<int64_t>(0, capacity_bytes() - used));
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, size_t n, unsigned) {
  CONTEXT();
  *out = nullptr;
  if (n == 0) return cudaSuccess;
  size_t size = (n + kPage - 1) / kPage * kPage;
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) FAIL(cudaErrorMemoryAllocation);
  pinned[(uintptr_t)p] = {size, false};
  note_pinned(int64_t(size));
  *out = p;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** out, size_t n) { return cudaHostAlloc(out, n, 0); }
cudaError_t cudaFreeHost(void* p) {
  CONTEXT();
  if (!p) return cudaSuccess;
  auto it = pinned.find((uintptr_t)p);
  if (it == pinned.end() || it->second.registered) FAIL(cudaErrorInvalidValue);
  for (size_t d = 0; d < visible.size(); ++d) drain(int(d));
  note_pinned(-int64_t(it->second.size));
  munmap(p, it->second.size);
  pinned.erase(it);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  CONTEXT();
  if (!p || !n) FAIL(cudaErrorInvalidValue);
  // Whole pages are pinned; what shares one with a range that is registered is refused.
  uintptr_t low = (uintptr_t)p / kPage * kPage;
  uintptr_t high = ((uintptr_t)p + n + kPage - 1) / kPage * kPage;
  for (auto& [at, range] : pinned)
    if (low < (at + range.size + kPage - 1) / kPage * kPage && at / kPage * kPage < high)
      FAIL(cudaErrorHostMemoryAlreadyRegistered);
  if (long most = env("SOFTWARE_GPU_PINNED_MIB", 0); most && me()->count[kPinnedNow] + int64_t(n) > (most << 20))
    FAIL(cudaErrorMemoryAllocation);
  pinned[(uintptr_t)p] = {n, true};
  note_pinned(int64_t(n));
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  CONTEXT();
  auto it = pinned.find((uintptr_t)p);
  if (it == pinned.end() || !it->second.registered) FAIL(cudaErrorHostMemoryNotRegistered);
  for (size_t d = 0; d < visible.size(); ++d) drain(int(d));
  note_pinned(-int64_t(it->second.size));
  pinned.erase(it);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** out, void* p, unsigned) { return *out = p, cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  BEGIN();
  Lock lock(mutex_);
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeUnregistered;
  a->device = -2;
  if (is_device(p) && is_live(p, 1)) {
    a->type = cudaMemoryTypeDevice;
    a->device = local_device(p);
    a->devicePointer = const_cast<void*>(p);
  } else if (pinned_at(p)) {
    a->type = cudaMemoryTypeHost;
    a->device = current;
    a->devicePointer = a->hostPointer = const_cast<void*>(p);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind, cudaStream_t s) {
  CONTEXT();
  if (auto e = copy(dst, src, n, of(s), false); e != cudaSuccess) FAIL(e);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t n, cudaMemcpyKind) {
  CONTEXT();
  if (auto e = copy(dst, src, n, of(nullptr), true); e != cudaSuccess) FAIL(e);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t n, cudaStream_t s) {
  return cudaMemcpyAsync(dst, src, n, cudaMemcpyDefault, s);
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t s) {
  for (size_t row = 0; row < height; ++row) {
    auto e = cudaMemcpyAsync((char*)dst + row * dpitch, (const char*)src + row * spitch, width, kind, s);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s) {
  CONTEXT();
  if (n == 0) return cudaSuccess;
  if (!is_live(p, n)) FAIL(cudaErrorInvalidValue);
  count(kMemset, int64_t(n));
  enqueue(of(s), 1000, true, [=] {
    char* to = storage((char*)p);
    if (value == 0) return clear(to, n);
    memset(to, value, n);
  });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t n) { return cudaMemsetAsync(p, value, n, nullptr); }
cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  CONTEXT();
  auto it = symbols.find(symbol);
  if (it == symbols.end()) FAIL(cudaErrorInvalidSymbol);
  if (!it->second.second)
    if (auto e = cudaMalloc(&it->second.second, std::max<size_t>(it->second.first, 1)); e != cudaSuccess)
      return e;
  *out = it->second.second;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* src, size_t n, size_t offset, cudaMemcpyKind k) {
  void* at;
  if (auto e = cudaGetSymbolAddress(&at, symbol); e != cudaSuccess) return e;
  return cudaMemcpy((char*)at + offset, src, n, k);
}

// ---- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  CONTEXT();
  auto* s = new Stream;
  s->device = current, s->flags = flags, s->priority = priority;
  streams().push_back(s);
  *out = reinterpret_cast<cudaStream_t>(s);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned f) {
  return cudaStreamCreateWithPriority(out, f, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {  // events may still name it: it stays, and is empty
  CONTEXT();
  run_up_to(of(s), UINT64_MAX);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  BEGIN();
  *p = of(s)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  CONTEXT();
  if (now_ns() < of(s)->free_at_ns) FAIL(cudaErrorNotReady);
  run_up_to(of(s), UINT64_MAX);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  uint64_t at;
  {
    CONTEXT();
    count(kSyncs, 1);
    run_up_to(of(s), UINT64_MAX);
    at = of(s)->free_at_ns;
  }
  sleep_until(at);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  CONTEXT();
  Stream* s = of(stream);
  auto* e = reinterpret_cast<Event*>(event);
  if (!e->recorded) return cudaSuccess;
  s->free_at_ns = std::max(s->free_at_ns, e->at_ns);
  if (Stream* other = e->stream; other != s)
    enqueue(s, 0, true, [other, up_to = e->up_to] { run_up_to(other, up_to); });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  BEGIN();
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t*) {
  BEGIN();
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { FAIL(cudaErrorNotSupported); }

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  CONTEXT();
  auto* e = new Event;
  e->flags = flags, e->device = current;
  *out = reinterpret_cast<cudaEvent_t>(e);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  BEGIN();
  delete reinterpret_cast<Event*>(e);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  CONTEXT();
  Stream* s = of(stream);
  auto* e = reinterpret_cast<Event*>(event);
  if (s->device != e->device) FAIL(cudaErrorInvalidResourceHandle);
  e->recorded = true, e->polls = 0, e->stream = s, e->up_to = s->queued;
  e->at_ns = std::max(now_ns(), s->free_at_ns);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  return cudaEventRecord(e, s);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  CONTEXT();
  auto* e = reinterpret_cast<Event*>(event);
  if (!e->recorded) return cudaSuccess;
  if (now_ns() < e->at_ns || (lazy && e->stream->done < e->up_to && e->polls++ < 3)) FAIL(cudaErrorNotReady);
  run_up_to(e->stream, e->up_to);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  uint64_t at;
  {
    CONTEXT();
    auto* e = reinterpret_cast<Event*>(event);
    if (!e->recorded) return cudaSuccess;
    count(kSyncs, 1);
    run_up_to(e->stream, e->up_to);
    at = e->at_ns;
  }
  sleep_until(at);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t stop) {
  CONTEXT();
  auto *a = reinterpret_cast<Event*>(start), *b = reinterpret_cast<Event*>(stop);
  if (!a->recorded || !b->recorded) FAIL(cudaErrorInvalidResourceHandle);
  if ((a->flags | b->flags) & cudaEventDisableTiming) FAIL(cudaErrorInvalidResourceHandle);
  if (now_ns() < a->at_ns || now_ns() < b->at_ns) FAIL(cudaErrorNotReady);
  *ms = float((double(b->at_ns) - double(a->at_ns)) / 1e6);
  return cudaSuccess;
}

// ---- the driver, asked for by name

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *out = driver ? dlsym(driver, name) : nullptr;
  if (!*out && driver) *out = dlsym(driver, (std::string(name) + "_v2").c_str());
  if (!*out && driver) *out = dlsym(driver, "software_gpu_not_supported");
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, out, CUDART_VERSION, flags, result);
}

}  // extern "C"
