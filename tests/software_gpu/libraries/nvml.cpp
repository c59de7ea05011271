// libnvidia-ml: the same GPUs as libcudart's, whatever CUDA_VISIBLE_DEVICES says. Memory is what processes
// hold, utilisation the virtual time that streams were busy, power and energy follow from it.

#include <algorithm>

#include "hardware.h"

using namespace software_gpu;

namespace {
using Device = intptr_t;  // index + 1
enum { kOk = 0, kInvalid = 2, kUnsupported = 3, kNotFound = 6, kTooSmall = 7 };
constexpr double kIdleW = 60, kBusyW = 340;
constexpr Device kMig = 1000;  // handles above it are MIG instances
int index_of(Device d) { return int(d > kMig ? d - kMig : d) - 1; }

double busy_s(int i) { return double(machine()->busy_ns[i].load()) / 1e9; }
double age_s() { return double(now_ns() - machine()->made_ns.load()) / 1e9; }
double share(int i) {  // busy since the last question of this process
  static double then[kMaxDevices], busy_then[kMaxDevices], known[kMaxDevices];
  double t = age_s(), b = busy_s(i);
  if (t - then[i] > 0.02) {
    known[i] = std::min(1.0, (b - busy_then[i]) / (t - then[i]));
    then[i] = t, busy_then[i] = b;
  }
  return known[i];
}
struct Memory { unsigned long long total, free, used; };
struct Memory2 { unsigned version; unsigned long long total, reserved, free, used; };
struct Pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};
struct Running { unsigned pid; unsigned long long bytes; unsigned gpu, compute; };
struct Field {
  unsigned id, scope;
  long long timestamp, latency;
  int type, result;
  union { double d; unsigned u; unsigned long long ull; } value;
};
struct Rates { unsigned gpu, memory; };
}  // namespace

extern "C" {
int nvmlInit_v2() {
  if (long code = env("SOFTWARE_GPU_NVML_ERROR", 0)) return int(code);  // 9: no driver; 18: driver and library differ
  return machine() ? kOk : kUnsupported;
}
int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
int nvmlShutdown() { return kOk; }
const char* nvmlErrorString(int e) {
  switch (e) {
    case kOk: return "Success";
    case kUnsupported: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Error";
  }
}
int nvmlSystemGetDriverVersion(char* out, unsigned n) { return snprintf(out, n, "%s", kDriverVersion), kOk; }
int nvmlSystemGetNVMLVersion(char* out, unsigned n) { return snprintf(out, n, "13.%s", kDriverVersion), kOk; }
int nvmlSystemGetCudaDriverVersion_v2(int* v) { return *v = 13000, kOk; }
int nvmlSystemGetCudaDriverVersion(int* v) { return *v = 13000, kOk; }
int nvmlDeviceGetCount_v2(unsigned* n) { return *n = unsigned(device_total()), kOk; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device* d) {
  if (int(i) >= device_total()) return kInvalid;
  return *d = Device(i) + 1, kOk;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, Device* d) {
  for (int i = 0; i < device_total(); ++i) {
    if (gpu_uuid(i) == uuid) return *d = i + 1, kOk;
    if (has_mig() && mig_uuid(i) == uuid) return *d = kMig + i + 1, kOk;
  }
  return kNotFound;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, Device* d) {
  unsigned domain, number;
  if (sscanf(bus, "%x:%x", &domain, &number) != 2 || number < 1 || int(number) > device_total()) return kNotFound;
  return *d = Device(number), kOk;
}
int nvmlDeviceGetIndex(Device d, unsigned* i) { return *i = unsigned(index_of(d)), kOk; }
int nvmlDeviceGetName(Device d, char* out, unsigned n) {
  return snprintf(out, n, "%s%s", device_name(), d > kMig ? kMigProfile : ""), kOk;
}
int nvmlDeviceGetUUID(Device d, char* out, unsigned n) {
  return snprintf(out, n, "%s", (d > kMig ? mig_uuid : gpu_uuid)(index_of(d)).c_str()), kOk;
}
int nvmlDeviceGetMigMode(Device, unsigned* now, unsigned* pending) {
  return *now = *pending = unsigned(has_mig()), kOk;
}
int nvmlDeviceGetMaxMigDeviceCount(Device, unsigned* n) { return *n = has_mig() ? 7 : 0, kOk; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device d, unsigned i, Device* mig) {
  if (!has_mig() || i > 0) return kNotFound;
  return *mig = kMig + d, kOk;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device mig, Device* d) { return *d = mig - kMig, kOk; }
int nvmlDeviceIsMigDeviceHandle(Device d, unsigned* is) { return *is = d > kMig, kOk; }
int nvmlDeviceGetPciInfo_v3(Device d, Pci* p) {
  memset(p, 0, sizeof *p);
  p->bus = unsigned(d);
  snprintf(p->legacy, sizeof p->legacy, "0000:%02X:00.0", unsigned(d));
  snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", unsigned(d));
  return kOk;
}
int nvmlDeviceGetMemoryInfo(Device d, Memory* m) {
  m->total = (unsigned long long)capacity_bytes();
  m->used = (unsigned long long)used_bytes(index_of(d)) + (500ull << 20);
  m->free = m->total - std::min(m->total, m->used);
  return kOk;
}
int nvmlDeviceGetMemoryInfo_v2(Device d, Memory2* m) {
  m->total = (unsigned long long)capacity_bytes() + (500ull << 20);
  m->reserved = 500ull << 20;
  m->used = (unsigned long long)used_bytes(index_of(d));
  m->free = m->total - m->reserved - std::min(m->total - m->reserved, m->used);
  return kOk;
}
int nvmlDeviceGetUtilizationRates(Device d, Rates* r) {
  if (d > kMig || has_mig()) return kUnsupported;
  r->gpu = unsigned(100 * share(index_of(d)));
  r->memory = r->gpu / 2;
  return kOk;
}
int nvmlDeviceGetPowerUsage(Device d, unsigned* mw) {
  if (d > kMig) return kUnsupported;
  return *mw = unsigned(1000 * (kIdleW + kBusyW * share(index_of(d)))), kOk;
}
int nvmlDeviceGetTotalEnergyConsumption(Device d, unsigned long long* mj) {
  if (d > kMig) return kUnsupported;
  double s = age_s();
  return *mj = (unsigned long long)(1000 * (kIdleW * s + kBusyW * std::min(s, busy_s(index_of(d))))), kOk;
}
int nvmlDeviceGetEnforcedPowerLimit(Device, unsigned* mw) { return *mw = 400000, kOk; }
int nvmlDeviceGetTemperature(Device, int, unsigned* t) { return *t = 45, kOk; }
int nvmlDeviceGetClockInfo(Device, int kind, unsigned* mhz) { return *mhz = kind == 1 ? 1410 : 1593, kOk; }
int nvmlDeviceGetMaxClockInfo(Device d, int kind, unsigned* mhz) { return nvmlDeviceGetClockInfo(d, kind, mhz); }
int nvmlDeviceGetApplicationsClock(Device d, int kind, unsigned* mhz) {
  return nvmlDeviceGetClockInfo(d, kind, mhz);
}
int nvmlDeviceGetCurrPcieLinkGeneration(Device, unsigned* v) { return *v = 4, kOk; }
int nvmlDeviceGetCurrPcieLinkWidth(Device, unsigned* v) { return *v = 16, kOk; }
int nvmlDeviceGetNvLinkState(Device, unsigned link, int* up) { return link < 12 ? (*up = 1, kOk) : kInvalid; }
int nvmlDeviceGetCurrentClocksEventReasons(Device, unsigned long long* bits) { return *bits = 0, kOk; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device, unsigned long long* bits) { return *bits = 0, kOk; }
int nvmlDeviceGetPcieThroughput(Device, int, unsigned* kb) { return usleep(20000), *kb = 1000, kOk; }
int nvmlDeviceGetTopologyCommonAncestor(Device a, Device b, int* level) { return *level = a == b ? 0 : 50, kOk; }
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned* n, Running* out) {
  auto* m = machine();
  take_back(m);
  unsigned found = 0, room = *n;
  for (auto& p : m->processes) {
    auto used = p.used_bytes[index_of(d)].load();
    if (p.pid.load() <= 0 || used == 0) continue;
    if (found < room && out) out[found] = {unsigned(p.pid.load()), (unsigned long long)used, 0xFFFFFFFF, 0xFFFFFFFF};
    found++;
  }
  *n = found;
  return found > room ? kTooSmall : kOk;
}
int nvmlDeviceGetComputeRunningProcesses_v2(Device d, unsigned* n, Running* out) {
  return nvmlDeviceGetComputeRunningProcesses_v3(d, n, out);
}
struct RunningV1 { unsigned pid; unsigned long long bytes; };  // what PyTorch asks for when memory runs out
int nvmlDeviceGetComputeRunningProcesses(Device d, unsigned* n, RunningV1* out) {
  Running found[512];
  unsigned room = *n, all = 512;
  int e = nvmlDeviceGetComputeRunningProcesses_v3(d, &all, found);
  for (unsigned i = 0; e == kOk && out && i < std::min(all, room); ++i) out[i] = {found[i].pid, found[i].bytes};
  *n = all;
  return e != kOk ? e : all > room ? kTooSmall : kOk;
}
int nvmlDeviceGetFieldValues(Device d, int n, Field* f) {
  for (int i = 0; i < n; ++i) {
    f[i].result = kUnsupported;
    if (f[i].id == 138 || f[i].id == 139) {  // NVLink, KiB
      f[i].result = kOk, f[i].type = 3;
      f[i].value.ull = (unsigned long long)(1000.0 * busy_s(index_of(d)));
    }
  }
  return kOk;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Device, unsigned, void*) { return kUnsupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device, unsigned, void*) { return kUnsupported; }
int nvmlDeviceGetGpuFabricInfoV(Device, void*) { return kUnsupported; }
int nvmlDeviceGetP2PStatus(Device, Device, int, int* status) { return *status = 0, kOk; }
}
