// libcudnn: descriptors that remember their attributes, one engine for every graph, a workspace of
// SOFTWARE_GPU_CUDNN_WORKSPACE_MIB (0 unless set) for each plan, and no computation.

#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <vector>

namespace {
struct Attribute {
  cudnnBackendAttributeType_t type;
  int64_t count;
  std::vector<char> bytes;
};
struct Descriptor {
  cudnnBackendDescriptorType_t type;
  std::map<int, Attribute> attributes;
};
Descriptor* of(cudnnBackendDescriptor_t d) { return static_cast<Descriptor*>(d); }

size_t width(cudnnBackendAttributeType_t t) {
  switch (t) {
    case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_BOOLEAN: case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_FRACTION: return 16;
    default: return 4;
  }
}
int64_t workspace_bytes() {
  const char* v = getenv("SOFTWARE_GPU_CUDNN_WORKSPACE_MIB");
  return v ? int64_t(atol(v)) << 20 : 0;
}
template <class T>
cudnnStatus_t made(T* out) {
  return *out = (T)calloc(1, 256), CUDNN_STATUS_SUCCESS;
}
}  // namespace

extern "C" {
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* d) {
  *d = new Descriptor{type, {}};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
  delete of(d);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* data) {
  auto* bytes = static_cast<const char*>(data);
  of(d)->attributes[int(name)] = {type, count, {bytes, bytes + size_t(count) * width(type)}};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t room, int64_t* found,
                                       void* out) {
  int64_t none;
  if (!found) found = &none;
  *found = 0;
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    *found = 1;
    return CUDNN_STATUS_SUCCESS;
  }
  if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE || name == CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE) {
    if (room > 0 && out) *static_cast<int64_t*>(out) = workspace_bytes();
    *found = 1;
    return CUDNN_STATUS_SUCCESS;
  }
  if (name == CUDNN_ATTR_ENGINE_GLOBAL_INDEX || name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT) {
    if (room > 0 && out) *static_cast<int64_t*>(out) = name == CUDNN_ATTR_ENGINE_GLOBAL_INDEX ? 0 : 1;
    *found = 1;
    return CUDNN_STATUS_SUCCESS;
  }
  if (name == CUDNN_ATTR_ENGINECFG_ENGINE) {  // the caller has made the engine's descriptor
    *found = 1;
    return CUDNN_STATUS_SUCCESS;
  }
  auto it = of(d)->attributes.find(int(name));
  if (it == of(d)->attributes.end()) return CUDNN_STATUS_SUCCESS;
  *found = it->second.count;
  int64_t n = room < it->second.count ? room : it->second.count;
  if (out && type != CUDNN_TYPE_BACKEND_DESCRIPTOR) memcpy(out, it->second.bytes.data(), size_t(n) * width(type));
  return CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return 13000; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType t, int* v) {
  *v = t == MAJOR_VERSION ? CUDNN_MAJOR : t == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}
const char* cudnnGetErrorString(cudnnStatus_t s) { return s ? "an error of the software GPU" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char* out, size_t n) { memset(out, 0, n); }
cudnnStatus_t cudnnCreate(cudnnHandle_t* h) { return made(h); }
cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) {
  return *(cudaStream_t*)h = s, CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t* s) {
  return *s = *(cudaStream_t*)h, CUDNN_STATUS_SUCCESS;
}
#define MAKES(kind)                                                                                   \
  cudnnStatus_t cudnnCreate##kind##Descriptor(cudnn##kind##Descriptor_t* d) { return made(d); }       \
  cudnnStatus_t cudnnDestroy##kind##Descriptor(cudnn##kind##Descriptor_t d) {                         \
    return free(d), CUDNN_STATUS_SUCCESS;                                                             \
  }
MAKES(Tensor)
MAKES(Filter)
MAKES(Convolution)
MAKES(Activation)
MAKES(Dropout)
MAKES(Pooling)
MAKES(RNN)
MAKES(RNNData)
MAKES(CTCLoss)
MAKES(SpatialTransformer)
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* n) {
  return *n = 0, CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t,
    size_t* n) {
  return *n = 0, CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t,
    const cudnnTensorDescriptor_t, size_t* n) {
  return *n = 0, CUDNN_STATUS_SUCCESS;
}
}
