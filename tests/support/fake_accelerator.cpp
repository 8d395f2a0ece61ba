// A device that torch knows nothing about, whose memory is the CPU's and whose operations run there.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <torch/library.h>

namespace {

void free_block(void* block) { std::free(block); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = size ? std::malloc(size) : nullptr;
    return {block, block, &free_block, c10::Device(c10::DeviceType::PrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

// A generator of the device draws what one of the CPU draws from the same state; see `fallback`.
struct Drawing final : at::CPUGeneratorImpl {
  Drawing() { device_ = c10::Device(c10::DeviceType::PrivateUse1, 0); }
};

// Fully sharded parameters give their memory back, and take it again.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Drawing>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr block = memory.allocate(size);
    if (size_t kept = std::min(size, storage.nbytes())) std::memcpy(block.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(block));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor seen(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       [keep = tensor](void*) {}, tensor.options().device(at::kCPU).requires_grad(false));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  seen(to).copy_(seen(from));
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return at::_local_scalar_dense(seen(self)); }

int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// Torch chooses the kernel of a convolution by the device, and leaves that of an unknown one to it.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> shift;
  if (bias && bias->defined()) shift = seen(*bias);
  return at::convolution(seen(input), seen(weight), shift, stride, padding, dilation, transposed, output_padding,
                         groups).to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  auto [to_input, to_weight, to_bias] = at::convolution_backward(
      seen(gradient), seen(input), seen(weight), weight.sizes()[0], stride, padding, dilation, transposed,
      output_padding, groups, mask);
  auto placed = [&](const at::Tensor& each) { return each.defined() ? each.to(input.device()) : each; };
  return {placed(to_input), placed(to_weight), placed(to_bias)};
}

// Its schema does not say that it changes the running statistics, so the fallback would change copies of them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, bool training,
    double momentum, double eps) {
  auto given = [](const std::optional<at::Tensor>& each) {
    return each && each->defined() ? std::optional<at::Tensor>(seen(*each)) : std::nullopt;
  };
  auto [output, mean, inverse] = at::native_batch_norm(seen(input), given(weight), given(bias), given(running_mean),
                                                       given(running_var), training, momentum, eps);
  return {output.to(input.device()), mean.to(input.device()), inverse.to(input.device())};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // A tensor without dimensions may be the CPU's, but not for a kernel that reads it by its address.
  const bool by_address = op.schema().name().rfind("aten::_fused_", 0) == 0;
  bool on_device = false, on_cpu = false;
  std::optional<at::Generator> own, lent;  // the CPU's operations refuse a generator of another device
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) on_device = true;
    else if (tensor.is_cpu() && (by_address || tensor.dim() > 0)) on_cpu = true;
  };
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    else if (value.isGenerator()) {
      own = value.toGenerator();
      TORCH_CHECK(own->device().type() == c10::DeviceType::PrivateUse1,
                  "Expected a generator of the device: ", op.schema().name(), " has one of the CPU");
      lent = at::detail::createCPUGenerator();
      lent->set_state(own->get_state());
      const_cast<c10::IValue&>(value) = *lent;
    }
    else if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
  }
  TORCH_CHECK(!(on_device && on_cpu) || op.schema().name() == "aten::index",
              "Expected all tensors to be on the same device: ", op.schema().name(), " has one of the CPU as well");
  at::native::cpu_fallback(op, stack);
  if (lent) own->set_state(lent->get_state());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

// Mixed precision: the operations that torch's GPUs compute in few bits, and those that they compute in float32.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define IN_FEW_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(IN_FEW_BITS)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(IN_FLOAT32)
}
