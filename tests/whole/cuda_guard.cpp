// Stands in for what a CPU build of PyTorch lacks on CUDA: the guard that autograd asks for devices and
// streams, and the hooks that convolutions ask about cuDNN. Does nothing and owns nothing, so that fake
// tensors on cuda:0 can go forward and backward. Without it their backward aborts the process.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device only_device() {
  return Device(DeviceType::CUDA, 0);
}

Stream only_stream() {
  return Stream(Stream::DEFAULT, only_device());
}

struct IdleGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Device getDevice() const override { return only_device(); }
  Device exchangeDevice(Device) const override { return only_device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device) const noexcept override { return only_stream(); }
  Stream getDefaultStream(Device) const override { return only_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return only_stream(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

IdleGuard guard;

}  // namespace

namespace at {

struct IdleHooks : CUDAHooksInterface {
  explicit IdleHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }

  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, IdleHooks)

}  // namespace at

// 1: installed; 0: this PyTorch has a guard of its own.
extern "C" int install_cuda_guard() {
  auto& place = c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
  if (place.load() != nullptr) {
    return 0;
  }
  place.store(&guard);
  return 1;
}
