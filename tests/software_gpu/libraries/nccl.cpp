// libnccl: collectives between the processes of one machine that really move the bytes, through a file in
// shared memory for each communicator. They are done in the host's call, not on the stream. What real NCCL
// would answer with a hang or with wrong data (ranks that call different collectives, or of different
// sizes) ends here with an error that says so. Above SOFTWARE_GPU_NCCL_MOVE_MIB, sizes are compared and no
// bytes moved: memory and control flow are the same, and full-size models do not take minutes. With
// SOFTWARE_GPU_NCCL_SOLO=1 one rank is alone in its groups of any size, and its collectives return at once.

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <sched.h>

#include <string>
#include <vector>

#include "hardware.h"

using namespace software_gpu;

extern "C" void software_gpu_wait_for_stream(cudaStream_t);
extern "C" void software_gpu_spend(cudaStream_t, uint64_t);

namespace {
constexpr int kRanks = 64;
constexpr size_t kChunk = size_t(1) << 20;

struct Call {
  int what;  // a Counter
  uint64_t count, bytes;
  int type, op, root;
  int64_t extra;
};
struct Board {
  std::atomic<uint32_t> arrived, round, aborted, joined;
  Call calls[kRanks];
  std::atomic<uint32_t> mail[kRanks][kRanks];  // 1: a chunk lies there
};
}  // namespace

struct ncclComm {
  std::string name;
  int rank, n;
  Board* board;
  char* data;  // a chunk for each rank, then one for each pair
  int splits = 0;
};

namespace {
struct Work {
  ncclComm_t comm;
  Call call;
  const char* send;
  char* recv;
  int peer;  // of a send or a recv, else -1
  bool sends;
  cudaStream_t stream;
};
thread_local int depth = 0;
thread_local std::vector<Work> group;
thread_local std::string last_error;

size_t width(ncclDataType_t t) {
  switch (t) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

ncclResult_t wrong(const std::string& what) {
  last_error = what;
  count(kFailures, 1);
  fprintf(stderr, "software GPU: NCCL: %s\n", what.c_str());
  return ncclInvalidUsage;
}

bool barrier(ncclComm_t c) {
  Board* b = c->board;
  uint32_t round = b->round.load();
  if (b->arrived.fetch_add(1) + 1 == uint32_t(c->n)) {
    b->arrived = 0;
    b->round.fetch_add(1);
    return true;
  }
  for (long turn = 0; b->round.load() == round; ++turn) {
    if (b->aborted.load()) return false;
    if (turn < 50) sched_yield();
    else usleep(turn < 2000 ? 50 : 1000);
  }
  return true;
}

bool solo() {
  static bool s = env("SOFTWARE_GPU_NCCL_SOLO", 0) != 0;
  return s;
}

ncclComm_t join(const std::string& name, int rank, int n) {
  size_t size = sizeof(Board) + size_t(n) * kChunk + size_t(n) * size_t(n) * kChunk;
  std::string path = machine_path() + "-nccl-" + name;
  int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, off_t(size)) != 0) return nullptr;
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  if (p == MAP_FAILED) return nullptr;
  auto* c = new ncclComm{name, rank, n, static_cast<Board*>(p), static_cast<char*>(p) + sizeof(Board)};
  if (!solo() && !barrier(c)) return nullptr;
  if (rank == 0) unlink(path.c_str());
  return c;
}

float from_bf16(uint16_t v) {
  uint32_t u = uint32_t(v) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

template <class T, class Get, class Set>
void reduce(char* out, const std::vector<const char*>& in, size_t n, int op, Get get, Set set) {
  for (size_t i = 0; i < n; ++i) {
    double sum = 0;
    for (size_t r = 0; r < in.size(); ++r) {
      double v = get(reinterpret_cast<const T*>(in[r])[i]);
      if (r == 0) sum = v;
      else if (op == ncclProd) sum *= v;
      else if (op == ncclMax) sum = v > sum ? v : sum;
      else if (op == ncclMin) sum = v < sum ? v : sum;
      else sum += v;
    }
    if (op == ncclAvg) sum /= double(in.size());
    reinterpret_cast<T*>(out)[i] = set(sum);
  }
}
template <class T>
void reduce_plain(char* out, const std::vector<const char*>& in, size_t n, int op) {
  reduce<T>(out, in, n, op, [](T v) { return double(v); }, [](double v) { return T(v); });
}
void reduce_any(int type, char* out, const std::vector<const char*>& in, size_t n, int op) {
  switch (type) {
    case ncclFloat32: return reduce_plain<float>(out, in, n, op);
    case ncclFloat64: return reduce_plain<double>(out, in, n, op);
    case ncclFloat16: return reduce_plain<_Float16>(out, in, n, op);
    case ncclBfloat16:
      return reduce<uint16_t>(out, in, n, op, [](uint16_t v) { return double(from_bf16(v)); },
                              [](double v) { return to_bf16(float(v)); });
    case ncclInt32: return reduce_plain<int32_t>(out, in, n, op);
    case ncclUint32: return reduce_plain<uint32_t>(out, in, n, op);
    case ncclInt64: return reduce_plain<int64_t>(out, in, n, op);
    case ncclUint64: return reduce_plain<uint64_t>(out, in, n, op);
    case ncclInt8: return reduce_plain<int8_t>(out, in, n, op);
    default: return reduce_plain<uint8_t>(out, in, n, op);
  }
}

// SOFTWARE_GPU_NCCL_FAULT: what happens to a rank at its n-th collective. error: the call fails; hang: it never
// comes; async: the communicator reports an error from then on, as after a lost peer.
std::atomic<long> seen{0};
bool struck(const ncclComm_t c, const char* kind) {
  static const Fault f = fault_of("SOFTWARE_GPU_NCCL_FAULT");
  return f.part >= 0 && c->rank == f.part && c->n > 1 && seen.load() >= f.after && !strcmp(kind, f.kind);
}

ncclResult_t collective(Work& w) {
  ncclComm_t c = w.comm;
  seen++;
  if (struck(c, "error")) {
    last_error = "Call to ibv_modify_qp failed with error Connection timed out";
    return ncclSystemError;
  }
  if (struck(c, "hang"))
    while (!c->board->aborted.load()) usleep(10000);
  Call call = w.call;
  Board* b = c->board;
  b->calls[c->rank] = call;
  if (!barrier(c)) return ncclSystemError;
  for (int r = 0; r < c->n; ++r) {
    const Call& o = b->calls[r];
    if (o.what != call.what || o.count != call.count || o.type != call.type || o.op != call.op ||
        o.root != call.root)
      return wrong("rank " + std::to_string(c->rank) + " calls " + kCounterNames[call.what] + " of " +
                   std::to_string(call.count) + " values of type " + std::to_string(call.type) + ", rank " +
                   std::to_string(r) + " " + kCounterNames[o.what] + " of " + std::to_string(o.count) +
                   " of type " + std::to_string(o.type));
  }
  const size_t item = width(ncclDataType_t(call.type)), n = size_t(c->n);
  const size_t all = call.count * item;  // of a rank's part, for gather and scatter
  char* recv = storage(w.recv);
  const char* send = storage(w.send);
  auto slot = [&](int r) { return c->data + size_t(r) * kChunk; };
  static const long most_mib = env("SOFTWARE_GPU_NCCL_MOVE_MIB", 64);
  bool moves = all <= size_t(most_mib) << 20;
  size_t parts = call.what == kReduceScatter ? n : 1;
  for (size_t part = 0; moves && part < parts; ++part) {
    for (size_t at = 0; at < all; at += kChunk) {
      size_t bytes = std::min(kChunk, all - at);
      bool gives = call.what != kBroadcast || c->rank == call.root;
      if (gives) memcpy(slot(c->rank), send + part * all + at, bytes);
      if (!barrier(c)) return ncclSystemError;
      std::vector<const char*> in;
      for (int r = 0; r < c->n; ++r) in.push_back(slot(r));
      if (call.what == kAllReduce || (call.what == kReduce && c->rank == call.root) ||
          (call.what == kReduceScatter && size_t(c->rank) == part))
        reduce_any(call.type, recv + at, in, bytes / item, call.op);
      else if (call.what == kBroadcast)
        memcpy(recv + at, slot(call.root), bytes);
      else if (call.what == kAllGather)
        for (size_t r = 0; r < n; ++r) memcpy(recv + r * all + at, slot(int(r)), bytes);
      if (!barrier(c)) return ncclSystemError;
    }
  }
  if (!moves && !barrier(c)) return ncclSystemError;
  return ncclSuccess;
}

// Sends and receives of a group go on side by side, a chunk at a time, so that none waits for another.
ncclResult_t exchange(std::vector<Work>& works) {
  std::vector<size_t> done(works.size(), 0);
  for (long turn = 0;; ++turn) {
    bool left = false, moved = false;
    for (size_t i = 0; i < works.size(); ++i) {
      Work& w = works[i];
      if (done[i] >= w.call.bytes) continue;
      left = true;
      ncclComm_t c = w.comm;
      if (c->board->aborted.load()) return ncclSystemError;
      int from = w.sends ? c->rank : w.peer, to = w.sends ? w.peer : c->rank;
      bool earlier = false;  // of the same pair: they keep their order
      for (size_t j = 0; j < i; ++j)
        earlier |= works[j].comm == c && works[j].sends == w.sends && works[j].peer == w.peer &&
                   done[j] < works[j].call.bytes;
      auto& mail = c->board->mail[from][to];
      if (earlier || mail.load() != (w.sends ? 0u : 1u)) continue;
      char* box = c->data + (size_t(c->n) + size_t(from) * size_t(c->n) + size_t(to)) * kChunk;
      size_t bytes = std::min(kChunk, size_t(w.call.bytes) - done[i]);
      if (w.sends) memcpy(box, storage(w.send) + done[i], bytes);
      else memcpy(storage(w.recv) + done[i], box, bytes);
      mail = w.sends ? 1 : 0;
      done[i] += bytes;
      moved = true;
    }
    if (!left) return ncclSuccess;
    if (!moved) turn < 50 ? (void)sched_yield() : (void)usleep(50);
  }
}

// Alone: as if all ranks had the same data. Only what is small is copied.
void echo(const Work& w) {
  if (w.call.what != kAllGather || w.call.bytes > kChunk) return;
  size_t part = w.call.bytes / size_t(w.comm->n);
  std::string mine(storage(w.send), part);
  for (int r = 0; r < w.comm->n; ++r) memcpy(storage(w.recv) + size_t(r) * part, mine.data(), part);
}

ncclResult_t run(std::vector<Work> works) {
  std::vector<Work> pairs;
  for (auto& w : works) {
    software_gpu_wait_for_stream(w.stream);
    software_gpu_spend(w.stream, uint64_t(double(w.call.bytes) / 100.0) + 10000);
    count(Counter(w.call.what), int64_t(w.call.bytes));
    count(kCollectives, 1);
    if (solo()) {
      echo(w);
      continue;
    }
    if (w.peer >= 0) {
      pairs.push_back(w);
    } else if (auto e = collective(w); e != ncclSuccess) {
      return e;
    }
  }
  return exchange(pairs);
}

ncclResult_t submit(int what, const void* send, void* recv, size_t n, ncclDataType_t type, int op, int root,
                    int peer, bool sends, ncclComm_t comm, cudaStream_t stream, size_t bytes) {
  if (!comm) return wrong("no communicator");
  if (n && ((send && !is_device(send)) || (recv && !is_device(recv)))) return wrong("a pointer to host memory");
  Work w{comm, {what, n, bytes, int(type), op, root, 0}, (const char*)send, (char*)recv, peer, sends, stream};
  if (depth > 0) {
    group.push_back(w);
    return ncclSuccess;
  }
  return run({w});
}
std::string hex(const ncclUniqueId& id) {
  std::string s;
  char two[3];
  for (int i = 0; i < 16; ++i) snprintf(two, 3, "%02x", (unsigned char)id.internal[i]), s += two;
  return s;
}
}  // namespace

extern "C" {
ncclResult_t ncclGetVersion(int* v) { return *v = NCCL_VERSION_CODE, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t e) {
  switch (e) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "internal error - please report this issue to the NCCL developers";
  }
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  FILE* f = fopen("/dev/urandom", "rb");
  size_t n = f ? fread(id->internal, 1, 16, f) : 0;
  if (f) fclose(f);
  return n == 16 ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank, ncclConfig_t*) {
  if (n > kRanks) return wrong("more ranks than this library knows");
  *c = join(hex(id), rank, n);
  return *c ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(c, n, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return ncclCommInitRankConfig(c, n, ids[0], rank, nullptr);
}
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  if (solo()) return wrong("a rank alone cannot split its communicator");
  Call call{};
  call.what = -1, call.root = color, call.extra = key;
  c->board->calls[c->rank] = call;
  if (!barrier(c)) return ncclSystemError;
  int rank = 0, n = 0;
  for (int r = 0; r < c->n; ++r) {
    const Call& o = c->board->calls[r];
    if (o.what != -1) return wrong("a rank does not split its communicator");
    if (o.root != color) continue;
    n++;
    rank += o.extra < key || (o.extra == key && r < c->rank);
  }
  std::string name = c->name + "-" + std::to_string(c->splits++) + "-" + std::to_string(color);
  if (!barrier(c)) return ncclSystemError;
  *out = color == NCCL_SPLIT_NOCOLOR ? nullptr : join(name, rank, n);
  return color == NCCL_SPLIT_NOCOLOR || *out ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t c) {
  if (c) c->board->aborted = 1;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* e) {
  *e = struck(c, "async") ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t c, int* n) { return *n = c->n, ncclSuccess; }
ncclResult_t ncclCommUserRank(ncclComm_t c, int* r) { return *r = c->rank, ncclSuccess; }
ncclResult_t ncclCommCuDevice(ncclComm_t, int* d) { return *d = 0, ncclSuccess; }
ncclResult_t ncclGroupStart() { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd() {
  if (--depth > 0) return ncclSuccess;
  std::vector<Work> works;
  works.swap(group);
  return run(works);
}
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t st) {
  return submit(kAllReduce, s, r, n, t, op, 0, -1, false, c, st, n * width(t));
}
ncclResult_t ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op,
                               ncclComm_t c, cudaStream_t st) {
  return submit(kReduceScatter, s, r, n, t, op, 0, -1, false, c, st, n * width(t) * size_t(c->n));
}
ncclResult_t ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
  return submit(kAllGather, s, r, n, t, 0, 0, -1, false, c, st, n * width(t) * size_t(c->n));
}
ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t st) {
  return submit(kBroadcast, s, r, n, t, 0, root, -1, false, c, st, n * width(t));
}
ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) {
  return ncclBroadcast(b, b, n, t, root, c, st);
}
ncclResult_t ncclReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root,
                        ncclComm_t c, cudaStream_t st) {
  return submit(kReduce, s, r, n, t, op, root, -1, false, c, st, n * width(t));
}
ncclResult_t ncclSend(const void* s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) {
  return submit(kSendRecv, s, nullptr, n, t, 0, 0, peer, true, c, st, n * width(t));
}
ncclResult_t ncclRecv(void* r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) {
  return submit(kSendRecv, nullptr, r, n, t, 0, 0, peer, false, c, st, n * width(t));
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  return *op = ncclSum, ncclSuccess;
}
}
