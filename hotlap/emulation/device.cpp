// A CUDA that torch takes for present, with one device that has no memory and computes nothing.
//
// Fake tensors have a device and no data. All that torch's CPU build lacks for them on `cuda:0` is
// a device guard and the hooks that say how many devices there are. Loaded before torch, because
// torch looks for its hooks once.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;

c10::Device only_device() { return {kCUDA, 0}; }

c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, only_device()); }

struct DeviceGuard : c10::impl::NoOpDeviceGuardImpl<kCUDA> {
    c10::Device exchangeDevice(c10::Device) const override { return only_device(); }
    c10::Device getDevice() const override { return only_device(); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    c10::Stream getStream(c10::Device) const noexcept override { return only_stream(); }
    c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard);

struct EmulatedHooks : at::CUDAHooksInterface {
    explicit EmulatedHooks(at::CUDAHooksArgs) {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
    c10::DeviceIndex deviceCount() const override { return 1; }
};

} // namespace

namespace at {
// torch looks the hooks up by this name.
using CUDAHooks = ::EmulatedHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at
