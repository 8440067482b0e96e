// A device "cuda:0" in the memory of the CPU, for torch's CPU build: every operator runs as the
// CPU's. It counts what matters on a GPU: pinned allocations, asynchronous copies, and calls that
// would wait for the device.
//
// A copy to pinned memory arrives late, as on a GPU: until somebody waits for an event that was
// recorded after it, the destination is filled with 0xff, which is NaN.
//
// Built and loaded by host_device.py, before torch is imported.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::Stream;

namespace {

const Device CUDA0(DeviceType::CUDA, 0);
constexpr size_t ALIGNMENT = 64;

std::recursive_mutex mutex; // of all that follows
using Lock = std::lock_guard<std::recursive_mutex>;

int64_t allocated_bytes = 0;
int64_t peak_bytes = 0;
int64_t pinned_allocations = 0;
int64_t asynchronous_copies = 0;
int64_t event_waits = 0;
std::vector<std::string> waits; // what waited for the device, other than for an event
bool waiting_is_an_error = false;
std::map<const char *, size_t> pinned_blocks; // start → bytes

// Set while the CPU's operator runs in place of the device's: its copies are not the program's.
thread_local bool in_fallback = false;

// ---- Asynchronous copies to the host ----

struct PendingCopy {
    int64_t number;
    Tensor destination; // in pinned memory
    Tensor values;      // of the source when the copy was queued
};

int64_t copies_queued = 0;
std::deque<PendingCopy> pending;

void deliver_up_to(int64_t number) {
    Lock guard(mutex);
    while (!pending.empty() && pending.front().number <= number) {
        pending.front().destination.copy_(pending.front().values);
        pending.pop_front();
    }
}

void deliver_all() { deliver_up_to(copies_queued); }

void queue_copy(const Tensor &destination, const Tensor &values) {
    Lock guard(mutex);
    std::memset(destination.data_ptr(), 0xff, destination.nbytes());
    pending.push_back({++copies_queued, destination, values.clone()});
}

// ---- Waiting ----

// A call that makes the host wait until the device has finished, and empties its queue.
void wait_for_device(const std::string &reason) {
    Lock guard(mutex);
    TORCH_CHECK(!waiting_is_an_error, "called a synchronizing CUDA operation: ", reason);
    waits.push_back(reason);
    deliver_all();
}

// ---- Memory ----

void *allocate_aligned(size_t bytes) {
    void *block = nullptr;
    if (posix_memalign(&block, ALIGNMENT, bytes)) throw std::bad_alloc();
    return block;
}

// Each block is preceded by its size.
struct DeviceAllocator : c10::Allocator {
    static void release(void *data) {
        if (!data) return;
        char *block = static_cast<char *>(data) - ALIGNMENT;
        Lock guard(mutex);
        allocated_bytes -= *reinterpret_cast<int64_t *>(block);
        std::free(block);
    }

    c10::DataPtr allocate(size_t bytes) override {
        char *block = static_cast<char *>(allocate_aligned(bytes + ALIGNMENT));
        *reinterpret_cast<int64_t *>(block) = bytes;
        std::memset(block + ALIGNMENT, 0xff, bytes); // NaN until it is written
        Lock guard(mutex);
        allocated_bytes += bytes;
        peak_bytes = std::max(peak_bytes, allocated_bytes);
        return {block + ALIGNMENT, block + ALIGNMENT, &release, CUDA0};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
};

struct PinnedAllocator : c10::Allocator {
    static void release(void *data) {
        Lock guard(mutex);
        pinned_blocks.erase(static_cast<char *>(data));
        std::free(data);
    }

    c10::DataPtr allocate(size_t bytes) override {
        void *data = allocate_aligned(std::max(bytes, ALIGNMENT));
        Lock guard(mutex);
        pinned_blocks[static_cast<char *>(data)] = bytes;
        ++pinned_allocations;
        return {data, data, &release, Device(DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
};

bool is_pinned(const void *data) {
    Lock guard(mutex);
    const char *address = static_cast<const char *>(data);
    auto after = pinned_blocks.upper_bound(address);
    if (after == pinned_blocks.begin()) return false;
    auto block = std::prev(after);
    return address < block->first + block->second;
}

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

// ---- Streams and events: one stream; an event is the number of the last copy before it ----

struct HostDeviceGuard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
    static Stream only_stream() { return Stream(Stream::DEFAULT, CUDA0); }

    Device exchangeDevice(Device) const override { return CUDA0; }
    Device getDevice() const override { return CUDA0; }
    Stream getStream(Device) const noexcept override { return only_stream(); }
    Stream getDefaultStream(Device) const override { return only_stream(); }
    Stream getNewStream(Device, int) const override { return only_stream(); }
    Stream getStreamFromGlobalPool(Device, bool) const override { return only_stream(); }
    Stream exchangeStream(Stream) const noexcept override { return only_stream(); }

    void record(void **event, const Stream &, const c10::DeviceIndex,
                const c10::EventFlag) const override {
        Lock guard(mutex);
        if (!*event) *event = new int64_t;
        *static_cast<int64_t *>(*event) = copies_queued;
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<int64_t *>(event);
    }
    void block(void *, const Stream &) const override {} // in order on the only stream
    bool queryEvent(void *event) const override {
        Lock guard(mutex);
        return !event || pending.empty() || pending.front().number > *static_cast<int64_t *>(event);
    }
    void synchronizeEvent(void *event) const override {
        Lock guard(mutex);
        ++event_waits;
        if (event) deliver_up_to(*static_cast<int64_t *>(event));
    }
    bool queryStream(const Stream &) const override { return pending.empty(); }
    void synchronizeStream(const Stream &) const override { wait_for_device("stream"); }
    void synchronizeDevice(const c10::DeviceIndex) const override { deliver_all(); }
};

// ---- Operators ----

// The same memory, as a tensor of the CPU.
Tensor on_host(const Tensor &tensor) {
    if (!tensor.is_cuda()) return tensor;
    auto options = tensor.options().device(at::kCPU).requires_grad(false);
    return at::from_blob(
        tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void *) {}, options,
        Device(at::kCPU));
}

Tensor &copy_(Tensor &self, const Tensor &source, bool non_blocking) {
    const bool from_host = !source.is_cuda(), to_host = !self.is_cuda();
    Tensor destination = on_host(self), values = on_host(source);
    if (in_fallback || (!from_host && !to_host) || self.numel() == 0) {
        destination.copy_(values);
        return self;
    }
    const Tensor &host_side = to_host ? self : source;
    if (non_blocking && is_pinned(host_side.const_data_ptr())) {
        Lock guard(mutex);
        ++asynchronous_copies;
        if (to_host && self.is_non_overlapping_and_dense()) {
            queue_copy(self, values);
            return self;
        }
    } else {
        const char *memory = is_pinned(host_side.const_data_ptr()) ? "pinned" : "pageable";
        wait_for_device(c10::str(non_blocking ? "" : "blocking ", "copy ",
                                 to_host ? "to " : "from ", memory, " memory, shape ",
                                 self.sizes()));
    }
    destination.copy_(values);
    return self;
}

Tensor copy_from(const Tensor &source, const Tensor &destination, bool non_blocking) {
    Tensor self = destination;
    copy_(self, source, non_blocking);
    return destination;
}

Tensor copy_from_and_resize(const Tensor &source, const Tensor &destination) {
    destination.resize_(source.sizes());
    return copy_from(source, destination, false);
}

at::Scalar local_scalar_dense(const Tensor &tensor) {
    if (!in_fallback) wait_for_device("item()");
    return on_host(tensor).item();
}

Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<Device>, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                     c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(
        C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
        c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor &self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
    auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
    return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                             C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor &self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor &self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor &resize_(const Tensor &self, c10::SymIntArrayRef size,
                      std::optional<at::MemoryFormat>) {
    at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size),
                                 std::nullopt);
    return self;
}

Tensor &set_storage(Tensor &self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
    return at::native::set_storage_cpu_(self, source, offset.expect_int(),
                                        C10_AS_INTARRAYREF_SLOW(size),
                                        C10_AS_INTARRAYREF_SLOW(stride));
}

// Operators whose result has a shape that depends on values, or that return a value to the host.
const std::set<std::string> WAITING_OPERATORS = {
    "aten::nonzero",           "aten::masked_select",
    "aten::_unique2",          "aten::unique_consecutive",
    "aten::unique_dim",        "aten::equal",
    "aten::repeat_interleave", "aten::bincount"};

template <typename Visit> void visit_tensors(const c10::IValue &value, Visit visit) {
    if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
    if (value.isList())
        for (const c10::IValue &element : value.toListRef()) visit_tensors(element, visit);
}

// What a GPU would not do silently: compute with a tensor of the CPU, or wait.
void check_call(const c10::OperatorHandle &op, const torch::jit::Stack &stack) {
    const auto &schema = op.schema();
    const bool indexes = schema.name() == "aten::index" || schema.name() == "aten::index_put_" ||
                         schema.name() == "aten::_index_put_impl_";
    bool on_cpu = false, by_mask = false;
    for (const c10::IValue &value : c10::ArrayRef(stack).slice(
             stack.size() - schema.arguments().size(), schema.arguments().size()))
        visit_tensors(value, [&](const Tensor &tensor) {
            on_cpu = on_cpu || (tensor.is_cpu() && tensor.dim() > 0);
        });
    if (indexes)
        visit_tensors(stack[stack.size() - schema.arguments().size() + 1],
                      [&](const Tensor &index) {
                          by_mask = by_mask || index.scalar_type() == at::kBool ||
                                    index.scalar_type() == at::kByte;
                      });
    TORCH_CHECK(!on_cpu || indexes, schema.name(),
                ": expected all tensors to be on cuda:0, found one on the CPU");
    if (WAITING_OPERATORS.count(schema.name()) || by_mask || on_cpu) wait_for_device(schema.name());
}

void run_on_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    if (in_fallback) return at::native::cpu_fallback(op, stack);
    check_call(op, *stack);
    in_fallback = true;
    try {
        at::native::cpu_fallback(op, stack);
    } catch (...) {
        in_fallback = false;
        throw;
    }
    in_fallback = false;
}

} // namespace

REGISTER_ALLOCATOR(DeviceType::CUDA, &device_allocator);
C10_REGISTER_GUARD_IMPL(CUDA, HostDeviceGuard);

// torch looks its hooks up by this name.
struct CUDAHooks : at::CUDAHooksInterface {
    CUDAHooks(at::CUDAHooksArgs) {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    void init() const override {}
    bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    at::Allocator *getPinnedMemoryAllocator() const override { return &pinned_allocator; }
    bool isPinnedPtr(const void *data) const override { return is_pinned(data); }
};

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", empty_memory_format);
    m.impl("empty_strided", empty_strided);
    m.impl("copy_", copy_);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar_dense);
    m.impl("as_strided", as_strided);
    m.impl("view", view);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage_storage_offset", set_storage);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY(host_device, m) { m.def("on_host(Tensor tensor) -> Tensor"); }
TORCH_LIBRARY_IMPL(host_device, CUDA, m) { m.impl("on_host", on_host); }

extern "C" {

struct Counts {
    int64_t pinned_allocations, asynchronous_copies, event_waits, waits, peak_bytes;
};

Counts host_device_counts() {
    Lock guard(mutex);
    return {pinned_allocations, asynchronous_copies, event_waits, (int64_t)waits.size(),
            peak_bytes};
}

// Of the wait with this number, from 0.
const char *host_device_wait_reason(int64_t number) {
    Lock guard(mutex);
    return waits.at(number).c_str();
}

void host_device_synchronize() { deliver_all(); }
void host_device_forbid_waits(int forbidden) { waiting_is_an_error = forbidden; }
}
