// The machine that all the libraries share: where device memory lies in a process's addresses, and a file in
// shared memory that says how much of each GPU each process holds, and what it has done.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>

namespace software_gpu {

constexpr int kMaxDevices = 16;
constexpr int kMaxProcesses = 512;

// ---- addresses

// A device pointer is reserved without access, so that host code that follows one dies by SIGSEGV, as with a
// real GPU. Its bytes lie kShadow above.
constexpr uintptr_t kDeviceBase = 0x200000000000;
constexpr uintptr_t kDeviceSpan = uintptr_t(256) << 30;
constexpr uintptr_t kShadow = 0x100000000000;

inline bool is_device(const void* p) {
  auto a = reinterpret_cast<uintptr_t>(p);
  return a >= kDeviceBase && a < kDeviceBase + kMaxDevices * kDeviceSpan;
}

inline int device_of(const void* p) {
  return int((reinterpret_cast<uintptr_t>(p) - kDeviceBase) / kDeviceSpan);
}

// Where the bytes of a device or a host pointer are.
template <class T>
T* storage(T* p) {
  return is_device((const void*)p) ? reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + kShadow) : p;
}

// ---- settings, by environment variables (README.md lists them)

inline const char* text_of(const char* name, const char* otherwise) {
  const char* v = getenv(name);
  return v && *v ? v : otherwise;
}

inline long env(const char* name, long otherwise) {
  const char* v = text_of(name, nullptr);
  return v ? atol(v) : otherwise;
}

inline int device_total() {
  long n = env("SOFTWARE_GPU_COUNT", 4);
  return int(n < kMaxDevices ? n : kMaxDevices);
}
inline int64_t capacity_bytes() { return int64_t(env("SOFTWARE_GPU_MEMORY_MIB", 81920)) << 20; }
inline int64_t context_bytes() { return int64_t(env("SOFTWARE_GPU_CONTEXT_MIB", 450)) << 20; }
inline const char* device_name() { return text_of("SOFTWARE_GPU_NAME", "NVIDIA A100-SXM4-80GB"); }
// With SOFTWARE_GPU_MIG=1 each GPU has one MIG instance, which CUDA knows by a name and a UUID of its own.
constexpr const char* kMigProfile = " MIG 1g.10gb";
inline bool has_mig() { return env("SOFTWARE_GPU_MIG", 0) != 0; }

// The file that is the machine; another file is another machine.
inline std::string machine_path() {
  std::string shared = "/dev/shm/software-gpu-" + std::to_string(getuid());
  return text_of("SOFTWARE_GPU_STATE", shared.c_str());
}

// A fault by a variable `part:after:kind`: which GPU or rank, after how many events, and of what kind.
struct Fault {
  int part = -1;
  long after = 0;
  char kind[32] = "";
};

inline Fault fault_of(const char* name) {
  Fault f;
  if (const char* v = text_of(name, nullptr)) sscanf(v, "%d:%ld:%31s", &f.part, &f.after, f.kind);
  return f;
}

// ---- names. No setting changes them: by these, stratbench knows that a record is of no real GPU.

constexpr const char* kDriverVersion = "580.65.06 (software GPU)";

// The last eight bytes of every UUID spell `software`. The others tell machines and GPUs apart, the first one the
// GPUs of a machine.
inline void uuid_bytes(int number, unsigned char out[16]) {
  uint64_t of_machine = 1469598103934665603ull;  // FNV-1a
  for (char c : machine_path()) of_machine = (of_machine ^ (unsigned char)c) * 1099511628211ull;
  memcpy(out, &of_machine, 8);
  out[0] = (unsigned char)(out[0] + 0xA7 * number);
  memcpy(out + 8, "software", 8);
}

inline std::string uuid_text(const char* kind, int number) {
  unsigned char u[16];
  uuid_bytes(number, u);
  char text[48];
  snprintf(text, sizeof text, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", kind,
           u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
  return text;
}
inline std::string gpu_uuid(int device) { return uuid_text("GPU", device); }

constexpr int kFirstMig = 100;
inline std::string mig_uuid(int device) { return uuid_text("MIG", kFirstMig + device); }

// ---- the file

enum Counter {
  kLaunches, kH2D, kD2H, kD2D, kHost, kMemset, kSyncs, kPinnedNow, kPinnedPeak, kAllReduce, kReduceScatter,
  kAllGather, kBroadcast, kReduce, kSendRecv, kCollectives, kFilled, kFailures, kCounters
};
constexpr const char* kCounterNames[kCounters] = {
    "launches", "h2d_bytes", "d2h_bytes", "d2d_bytes", "h2h_bytes", "memset_bytes", "syncs", "pinned_bytes",
    "pinned_peak_bytes", "allreduce_bytes", "reducescatter_bytes", "allgather_bytes", "broadcast_bytes",
    "reduce_bytes", "sendrecv_bytes", "collectives", "filled_bytes", "failures"};

struct Process {
  std::atomic<int32_t> pid;
  std::atomic<int32_t> ended;
  std::atomic<int64_t> started;  // in ticks since boot: a number may be another process's later
  std::atomic<int64_t> used_bytes[kMaxDevices];
  std::atomic<int64_t> count[kCounters];
};

struct Machine {
  // For readers: the numbers of GPUs and of processes, and the counters' names. machine.py reads the file.
  char layout[1024];
  std::atomic<uint64_t> made_ns;
  std::atomic<int64_t> busy_ns[kMaxDevices];
  Process processes[kMaxProcesses];
};

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000ull + uint64_t(t.tv_nsec);
}

inline Machine* machine() {
  static Machine* m = [] {
    int fd = open(machine_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Machine)) != 0) {
      perror("software GPU: SOFTWARE_GPU_STATE");
      abort();
    }
    void* p = mmap(nullptr, sizeof(Machine), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) abort();
    auto* made = static_cast<Machine*>(p);
    std::string layout = std::to_string(kMaxDevices) + " " + std::to_string(kMaxProcesses);
    for (auto* name : kCounterNames) layout += std::string(" ") + name;
    strncpy(made->layout, layout.c_str(), sizeof made->layout - 1);
    uint64_t not_yet = 0;
    made->made_ns.compare_exchange_strong(not_yet, now_ns());
    return made;
  }();
  return m;
}

// When a process was started, in ticks since boot; 0 where there is none, or only its zombie.
inline int64_t started_at(int pid) {
  char path[64], line[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* f = fopen(path, "r");
  if (!f) return 0;
  size_t n = fread(line, 1, sizeof line - 1, f);
  fclose(f);
  line[n] = 0;
  const char* name_end = strrchr(line, ')');
  if (!name_end || name_end[1] != ' ' || name_end[2] == 'Z' || name_end[2] == 'X') return 0;
  const char* field = name_end + 2;  // the third; the start is the 22nd
  for (int i = 3; field && i < 22; ++i)
    if ((field = strchr(field, ' '))) ++field;
  return field ? atoll(field) : 0;
}

// The driver gives back what a process held when it ends.
inline void take_back(Machine* m) {
  for (auto& p : m->processes) {
    int pid = p.pid.load();
    if (pid > 0 && !p.ended.load() && started_at(pid) != p.started.load()) {
      p.ended = 1;
      for (auto& u : p.used_bytes) u = 0;
    }
  }
}

// This process's entry in the file.
inline Process* me() {
  static std::mutex mutex;
  static Process* mine = nullptr;
  static int mine_pid = 0;
  int pid = getpid();
  std::lock_guard<std::mutex> lock(mutex);
  if (mine && mine_pid == pid) return mine;
  Machine* m = machine();
  take_back(m);
  for (bool of_ended : {false, true}) {  // unused entries first: tests read what ended processes did
    for (auto& p : m->processes) {
      int32_t was = p.pid.load();
      if (of_ended ? was < 0 || !p.ended.load() : was != 0) continue;
      if (!p.pid.compare_exchange_strong(was, -pid)) continue;
      for (auto& u : p.used_bytes) u = 0;
      for (auto& c : p.count) c = 0;
      p.started = started_at(pid);
      p.ended = 0;
      p.pid = pid;
      mine = &p;
      mine_pid = pid;
      return mine;
    }
  }
  fprintf(stderr, "software GPU: more than %d processes\n", kMaxProcesses);
  abort();
}

inline void count(Counter c, int64_t n) { me()->count[c] += n; }

inline int64_t used_bytes(int device) {
  Machine* m = machine();
  take_back(m);
  int64_t sum = 0;
  for (auto& p : m->processes) sum += p.used_bytes[device].load();
  return sum;
}

}  // namespace software_gpu
