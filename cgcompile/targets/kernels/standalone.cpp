// Replacements of the libtorch functions that a shared object of AOTInductor calls: tensors; products, convolutions and attention
// of float32; cumulative sums, top-k; functions of vectors.
//
// Linked into the object with -Bsymbolic, so that the object calls these functions even in a process with libtorch.  The headers of
// torch declare the functions, so this file does not compile with a torch that has another signature.  If a function is missing
// here, the build links libtorch, or fails and names it.  A function returns an error for arguments that it does not support.

#include <omp.h>
#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "products.h"

namespace {

// --- tensors ------------------------------------------------------------------------------------------------------------

// The bytes of an element, by the number of its c10::ScalarType; 0 for dtypes that no bundle has.
constexpr int64_t WIDTHS[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 2, 4, 8};
constexpr int32_t INT32 = 3, INT64 = 4, FLOAT = 6, BOOL = 11, BFLOAT16 = 15;
constexpr int64_t HUGE_PAGE = 1 << 21;

struct Tensor {
  std::shared_ptr<void> owner;  // null: the caller owns the memory
  char* storage;
  int64_t bytes, offset;  // bytes of the storage; elements before the first one
  std::vector<int64_t> sizes, strides;
  int32_t dtype;

  int64_t width() const { return WIDTHS[dtype]; }
  int64_t rank() const { return static_cast<int64_t>(sizes.size()); }
  int64_t count() const {
    int64_t product = 1;
    for (auto size : sizes) product *= size;
    return product;
  }
  char* data() const { return storage + offset * width(); }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  // The stride of an axis, or 0 for an axis of one element, so that operands broadcast.
  int64_t step(int64_t axis) const { return sizes[axis] == 1 ? 0 : strides[axis]; }
};

Tensor& of(AtenTensorHandle handle) { return *reinterpret_cast<Tensor*>(handle); }
AtenTensorHandle handle(Tensor tensor) { return reinterpret_cast<AtenTensorHandle>(new Tensor(std::move(tensor))); }

int64_t span(int64_t rank, const int64_t* sizes, const int64_t* strides) {
  int64_t last = 0;
  for (int64_t axis = 0; axis < rank; axis++) {
    if (sizes[axis] == 0) return 0;
    last += (sizes[axis] - 1) * strides[axis];
  }
  return last + 1;
}

bool known(int32_t dtype) { return dtype >= 0 && dtype < static_cast<int32_t>(std::size(WIDTHS)) && WIDTHS[dtype]; }

AOTITorchError allocated(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, AtenTensorHandle* result) {
  if (!known(dtype)) return AOTI_TORCH_FAILURE;
  int64_t bytes = span(rank, sizes, strides) * WIDTHS[dtype];
  void* memory = std::aligned_alloc(ALIGNMENT, (bytes / ALIGNMENT + 1) * ALIGNMENT);
  if (memory == nullptr) return AOTI_TORCH_FAILURE;
  *result = handle({std::shared_ptr<void>(memory, std::free), static_cast<char*>(memory), bytes, 0, {sizes, sizes + rank}, {strides, strides + rank}, dtype});
  return AOTI_TORCH_SUCCESS;
}

// Whether the elements are a block of memory without gaps or overlaps.
bool dense(const Tensor& tensor) {
  std::vector<size_t> axes;
  for (size_t axis = 0; axis < tensor.sizes.size(); axis++)
    if (tensor.sizes[axis] != 1) axes.push_back(axis);
  std::sort(axes.begin(), axes.end(), [&](size_t one, size_t other) { return tensor.strides[one] < tensor.strides[other]; });
  int64_t step = 1;
  for (size_t axis : axes) {
    if (tensor.strides[axis] != step) return false;
    step *= tensor.sizes[axis];
  }
  return true;
}

// Whether images have their channels innermost, by the rule of torch's suggest_memory_format.
bool channels_last(const Tensor& pictures) {
  if (pictures.strides[1] == 0) return false;
  int64_t least = 0;
  for (int64_t axis : {1, 3, 2, 0}) {
    if (pictures.sizes[axis] == 0 || pictures.strides[axis] < least || (axis == 0 && least == pictures.strides[1])) return false;
    least = pictures.strides[axis] * pictures.sizes[axis];
  }
  return true;
}

// The strides of torch's empty_like, on which compiled code relies.  A dense tensor keeps its strides.  Other tensors keep the
// order of their axes by stride, without gaps.  Of axes with equal strides the longer axis is outer.  An axis of stride 0 keeps its
// place among its neighbours.
std::vector<int64_t> strides_like(const Tensor& tensor) {
  if (dense(tensor)) return tensor.strides;
  const auto& sizes = tensor.sizes;
  const auto& steps = tensor.strides;
  auto outer = [&](int64_t one, int64_t other) {  // 1: `one` is outer; -1: `one` is inner; 0: undecided
    if (steps[one] == 0 || steps[other] == 0) return 0;
    if (steps[one] != steps[other]) return steps[one] > steps[other] ? 1 : -1;
    return sizes[one] > sizes[other] ? 1 : 0;
  };
  std::vector<int64_t> order(sizes.size());  // from the innermost axis on
  for (size_t place = 0; place < order.size(); place++) order[place] = static_cast<int64_t>(order.size() - 1 - place);
  for (int64_t next = 1; next < tensor.rank(); next++)
    for (int64_t before = next - 1, at = next; before >= 0; before--) {
      int which = outer(order[before], order[at]);
      if (which < 0) break;
      if (which == 0) continue;
      std::swap(order[before], order[at]);
      at = before;
    }
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (int64_t axis : order) {
    strides[axis] = step;
    step *= std::max<int64_t>(1, sizes[axis]);
  }
  return strides;
}

int64_t axis_of(const Tensor& tensor, int64_t axis) { return axis < 0 ? axis + tensor.rank() : axis; }

AOTITorchError row_major(const std::vector<int64_t>& sizes, int32_t dtype, AtenTensorHandle* result) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t axis = sizes.size(); axis-- > 0; step *= std::max<int64_t>(1, sizes[axis])) strides[axis] = step;
  return allocated(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, result);
}

// Calls `visit` for every line along an axis.  Arguments: the offset of the line in `from`; its offset and step in a row-major
// tensor with as many lines, of `length` elements each.  Offsets and steps are in elements.
template <typename Each> void lines(const Tensor& from, int64_t axis, int64_t length, Each visit) {
  int64_t inner = 1, count = 1;
  for (int64_t at = 0; at < from.rank(); at++) {
    if (at == axis) continue;
    count *= from.sizes[at];
    if (at > axis) inner *= from.sizes[at];
  }
#pragma omp parallel for schedule(static) if (count * length > (1 << 15))
  for (int64_t line = 0; line < count; line++) {
    int64_t source = 0, left = line;
    for (int64_t at = from.rank() - 1; at >= 0; at--) {
      if (at == axis) continue;
      source += left % from.sizes[at] * from.strides[at];
      left /= from.sizes[at];
    }
    visit(source, line / inner * inner * length + line % inner, inner);
  }
}

void copy_axes(const Tensor& from, const Tensor& into, int64_t axis, int64_t source, int64_t target) {
  if (axis == from.rank()) {
    std::memcpy(into.data() + target * from.width(), from.data() + source * from.width(), from.width());
    return;
  }
  for (int64_t index = 0; index < from.sizes[axis]; index++)
    copy_axes(from, into, axis + 1, source + index * from.strides[axis], target + index * into.strides[axis]);
}

// --- cached panels of constant weights ----------------------------------------------------------------------------------

struct Kept {
  int64_t holders = 0;  // calls of cgbundle_fix without a cgbundle_release
  int64_t bytes = 0;
  struct Panels {
    bool used = false;  // the first use packs nothing: one use is not worth the memory, and the first call must be fast
    std::shared_ptr<float> data;
  };
  std::map<std::array<int64_t, 5>, Panels> panels;  // by offset, sizes and strides of a matrix
};

std::mutex keeping;
std::map<const char*, Kept> fixed;  // by the address of the memory

std::shared_ptr<float> packed(const Matrix& b) {
  int64_t panels = (b.columns + COLUMNS - 1) / COLUMNS, bytes = panels * b.rows * COLUMNS * sizeof(float);
  int64_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
  float* data = static_cast<float*>(std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit));
  if (data == nullptr) return nullptr;
  if (unit == HUGE_PAGE) madvise(data, bytes, MADV_HUGEPAGE);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; panel++) pack(b, 0, b.rows, panel * COLUMNS, data + panel * b.rows * COLUMNS);
  return std::shared_ptr<float>(data, std::free);
}

// Returns all panels of a matrix in fixed memory from its second use on, else null.
std::shared_ptr<float> kept_panels(const Matrix& b) {
  std::lock_guard<std::mutex> lock(keeping);
  const char* begin = reinterpret_cast<const char*>(b.data);
  auto entry = fixed.upper_bound(begin);
  if (entry == fixed.begin() || b.rows == 0 || b.columns == 0) return nullptr;
  --entry;
  Kept& memory = entry->second;
  const char* end = reinterpret_cast<const char*>(b.at(b.rows - 1, b.columns - 1) + 1);
  if (end > entry->first + memory.bytes) return nullptr;
  Kept::Panels& panels = memory.panels[{begin - entry->first, b.rows, b.columns, b.row, b.column}];
  if (panels.used && !panels.data) panels.data = packed(b);
  panels.used = true;
  return panels.data;
}

constexpr int64_t NEAR = 2 << 20;           // bytes of matrix a per band: about the size of the caches of a core
constexpr int64_t FAR = 16 << 20;           // panels of this many bytes do not fit the caches, so every band reads them from memory

// c = added + alpha * a @ b, by bands of rows.  With cached panels, the rows of a band fit a core's caches.  Without them, there
// are only as many bands as the threads need, because each band packs its panels again.
void product(const Matrix& a, const Matrix& b, const Matrix& c, const Added& added, float alpha, bool parallel) {
  int64_t panels = (c.columns + COLUMNS - 1) / COLUMNS, height = std::max<int64_t>(1, c.rows);
  std::shared_ptr<float> kept = parallel ? kept_panels(b) : nullptr;
  int64_t threads = !parallel || c.rows * c.columns * b.rows < WORTH_THREADS ? 1 : omp_get_max_threads();
  if (threads > 1) {
    int64_t fewest = std::max<int64_t>(1, 4 * threads / panels);
    height = std::max<int64_t>(BAND, (c.rows + fewest - 1) / fewest + ROWS - 1) / ROWS * ROWS;
  }
  if (kept && b.rows * b.columns < FAR / static_cast<int64_t>(sizeof(float))) height = std::min(height, std::max<int64_t>(4 * ROWS, NEAR / sizeof(float) / b.rows / ROWS * ROWS));
  int64_t bands = std::max<int64_t>(1, (c.rows + height - 1) / height);
  height = (c.rows + bands * ROWS - 1) / (bands * ROWS) * ROWS;  // nearly equal bands: a band of few rows would read all panels too
  int64_t tasks = bands * panels;
  auto part = [&](int64_t task) {
    int64_t first = task / panels * height;
    panel_product(a, b, c, added, first, std::min<int64_t>(c.rows, first + height), task % panels * COLUMNS, alpha, kept.get());
  };
  if (threads == 1) {
    for (int64_t task = 0; task < tasks; task++) part(task);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; task++) part(task);
}

// The matrix in the last two axes, at `index` of the axes before them.
Matrix matrix(const Tensor& tensor, std::initializer_list<int64_t> index = {}) {
  int64_t axis = 0, start = 0, rank = tensor.rank();
  for (int64_t value : index) start += value * tensor.step(axis++);
  return {tensor.floats() + start, tensor.sizes[rank - 2], tensor.sizes[rank - 1], tensor.strides[rank - 2], tensor.strides[rank - 1]};
}

bool all_floats(std::initializer_list<const Tensor*> tensors, int64_t rank) {
  return std::all_of(tensors.begin(), tensors.end(), [rank](const Tensor* value) { return value->dtype == FLOAT && value->rank() == rank; });
}

// Whether `out` has the sizes of the product of `a` and `b`, which are matrices or batches of matrices.
bool multiplies(const Tensor& a, const Tensor& b, const Tensor& out, int64_t rank) {
  if (!all_floats({&a, &b, &out}, rank)) return false;
  bool batches = rank < 3 || (a.sizes[0] == out.sizes[0] && b.sizes[0] == out.sizes[0]);
  return batches && a.sizes[rank - 1] == b.sizes[rank - 2] && out.sizes[rank - 2] == a.sizes[rank - 2] && out.sizes[rank - 1] == b.sizes[rank - 1];
}

// Whether a tensor broadcasts to these sizes.
bool broadcasts(const Tensor& tensor, const std::vector<int64_t>& sizes) {
  int64_t more = static_cast<int64_t>(sizes.size()) - tensor.rank();
  for (int64_t axis = 0; more >= 0 && axis < tensor.rank(); axis++)
    if (tensor.sizes[axis] != 1 && tensor.sizes[axis] != sizes[axis + more]) return false;
  return more >= 0;
}

}  // namespace

namespace at {
__attribute__((visibility("default"))) int get_num_threads() { return omp_get_max_threads(); }
}  // namespace at

extern "C" {

const char* cgbundle_built_with() { return BUILT_WITH; }

// Declares memory as constant, until cgbundle_release was called as often as cgbundle_fix.
void cgbundle_fix(const char* begin, int64_t bytes) {
  std::lock_guard<std::mutex> lock(keeping);
  Kept& memory = fixed[begin];
  memory.holders++;
  memory.bytes = std::max(memory.bytes, bytes);
}

void cgbundle_release(const char* begin) {
  std::lock_guard<std::mutex> lock(keeping);
  auto entry = fixed.find(begin);
  if (entry != fixed.end() && --entry->second.holders == 0) fixed.erase(entry);
}

int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_device_type_cuda() { return 1; }
int32_t aoti_torch_layout_strided() { return 0; }
#define DTYPE(name, number) int32_t aoti_torch_dtype_##name() { return number; }
DTYPE(uint8, 0) DTYPE(int8, 1) DTYPE(int16, 2) DTYPE(int32, 3) DTYPE(int64, 4) DTYPE(float16, 5) DTYPE(float32, 6) DTYPE(float64, 7)
DTYPE(complex64, 9) DTYPE(complex128, 10) DTYPE(bool, 11) DTYPE(bfloat16, 15) DTYPE(float8_e5m2, 23) DTYPE(float8_e4m3fn, 24)
DTYPE(uint16, 27) DTYPE(uint32, 28) DTYPE(uint64, 29)
#undef DTYPE

bool aoti_torch_grad_mode_is_enabled() { return false; }
void aoti_torch_grad_mode_set_enabled(bool) {}

void aoti_torch_check(bool holds, const char*, const char*, uint32_t, const char* message) {
  if (!holds) throw std::runtime_error(message);
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  delete &of(tensor);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_tensor_from_blob(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t, int32_t, AtenTensorHandle* result) {
  if (!known(dtype)) return AOTI_TORCH_FAILURE;
  int64_t bytes = (offset + span(rank, sizes, strides)) * WIDTHS[dtype];
  *result = handle({nullptr, static_cast<char*>(data), bytes, offset, {sizes, sizes + rank}, {strides, strides + rank}, dtype});
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_tensor_from_blob_v2(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t type, int32_t index, AtenTensorHandle* result, int32_t, const uint8_t*, int64_t) {
  return aoti_torch_create_tensor_from_blob(data, rank, sizes, strides, offset, dtype, type, index, result);
}

AOTITorchError aoti_torch_empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t, int32_t, AtenTensorHandle* result) {
  return allocated(rank, sizes, strides, dtype, result);
}

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* result) {
  *result = handle(of(tensor));
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, AtenTensorHandle* result) {
  const Tensor& from = of(self);
  *result = handle({from.owner, from.storage, from.bytes, offset, {sizes, sizes + rank}, {strides, strides + rank}, from.dtype});
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_assign_tensors_out(AtenTensorHandle source, AtenTensorHandle* result) { return aoti_torch_new_tensor_handle(source, result); }

#define ITEM(name, type, number) \
  AOTITorchError aoti_torch_item_##name(AtenTensorHandle tensor, type* result) { \
    if (of(tensor).dtype != number || of(tensor).count() != 1) return AOTI_TORCH_FAILURE; \
    *result = *reinterpret_cast<type*>(of(tensor).data()); \
    return AOTI_TORCH_SUCCESS; \
  }
ITEM(bool, bool, BOOL)
ITEM(int32, int32_t, INT32)
ITEM(int64, int64_t, INT64)
ITEM(float32, float, FLOAT)
#undef ITEM

// The result has the strides of empty_like, as in torch.
AOTITorchError aoti_torch_clone(AtenTensorHandle self, AtenTensorHandle* result) {
  const Tensor& from = of(self);
  auto strides = strides_like(from);
  if (allocated(from.rank(), from.sizes.data(), strides.data(), from.dtype, result)) return AOTI_TORCH_FAILURE;
  if (dense(from))
    std::memcpy(of(*result).data(), from.data(), from.count() * from.width());
  else
    copy_axes(from, of(*result), 0, 0, 0);
  return AOTI_TORCH_SUCCESS;
}

#define GETTER(name, type, expression) \
  AOTITorchError aoti_torch_get_##name(AtenTensorHandle tensor, type* result) { Tensor& self = of(tensor); *result = expression; return AOTI_TORCH_SUCCESS; }
GETTER(data_ptr, void*, self.data())
GETTER(dim, int64_t, self.rank())
GETTER(numel, int64_t, self.count())
GETTER(dtype, int32_t, self.dtype)
GETTER(sizes, int64_t*, self.sizes.data())
GETTER(strides, int64_t*, self.strides.data())
GETTER(storage_offset, int64_t, self.offset)
GETTER(storage_size, int64_t, self.bytes)
GETTER(device_type, int32_t, (static_cast<void>(self), 0))
GETTER(device_index, int32_t, (static_cast<void>(self), 0))
#undef GETTER

AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2, double beta, double alpha) {
  const Tensor& added = of(self);
  if (!multiplies(of(mat1), of(mat2), of(out), 2) || added.dtype != FLOAT || !broadcasts(added, of(out).sizes)) return AOTI_TORCH_FAILURE;
  int64_t rank = added.rank();  // 0 to 2
  Added from{beta == 0 ? nullptr : added.floats(), rank == 2 ? added.step(0) : 0, rank ? added.step(rank - 1) : 0, static_cast<float>(beta)};
  product(matrix(of(mat1)), matrix(of(mat2)), matrix(of(out)), from, static_cast<float>(alpha), true);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  if (!multiplies(of(self), of(mat2), of(out), 2)) return AOTI_TORCH_FAILURE;
  product(matrix(of(self)), matrix(of(mat2)), matrix(of(out)), {}, 1.f, true);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cpu_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  if (!multiplies(of(self), of(mat2), of(out), 3)) return AOTI_TORCH_FAILURE;
  int64_t batches = of(out).sizes[0];
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t batch = 0; batch < batches; batch++)
    product(matrix(of(self), {batch}), matrix(of(mat2), {batch}), matrix(of(out), {batch}), {}, 1.f, false);
  return AOTI_TORCH_SUCCESS;
}

// softmax(query @ key^T * scale + mask) @ value, for each head and band of rows.  The second result, the logarithms of the sums, is
// for gradients.  Compiled inference never reads it, so it is not written.
AOTITorchError aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, double dropout, int32_t causal, AtenTensorHandle* attn_mask, double* scale, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  const Tensor &q = of(query), &k = of(key), &v = of(value);
  const Tensor* mask = attn_mask && *attn_mask ? &of(*attn_mask) : nullptr;
  if (dropout != 0 || !all_floats({&q, &k, &v}, 4) || (mask && !all_floats({mask}, mask->rank() == 2 ? 2 : 4))) return AOTI_TORCH_FAILURE;
  int64_t batches = q.sizes[0], heads = q.sizes[1], rows = q.sizes[2], width = q.sizes[3], keys = k.sizes[2];
  // Several heads of queries share a head of keys and one of values.
  auto lacks = [&](const Tensor& tensor) { return (tensor.sizes[0] != batches && tensor.sizes[0] != 1) || tensor.sizes[1] == 0 || heads % tensor.sizes[1] || tensor.sizes[2] != keys || tensor.sizes[3] != width; };
  if (lacks(k) || lacks(v) || (mask && !broadcasts(*mask, {batches, heads, rows, keys}))) return AOTI_TORCH_FAILURE;
  auto strides = strides_like(q);
  int64_t sums[] = {batches, rows, heads}, sum_strides[] = {rows * heads, heads, 1};
  if (allocated(4, q.sizes.data(), strides.data(), FLOAT, ret0) || allocated(3, sums, sum_strides, FLOAT, ret1)) return AOTI_TORCH_FAILURE;
  const Tensor& out = of(*ret0);
  auto head_of = [&](const Tensor& tensor, int64_t batch, int64_t head) { return matrix(tensor, {batch, head / (heads / tensor.sizes[1])}); };
  float factor = static_cast<float>(scale ? *scale : 1 / std::sqrt(static_cast<double>(width)));
  int64_t bands = (rows + BAND - 1) / BAND, line = (keys + LANES - 1) / LANES * LANES;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < batches * heads * bands; task++) {
    int64_t batch = task / bands / heads, head = task / bands % heads, first = task % bands * BAND;
    int64_t count = std::min<int64_t>(BAND, rows - first);
    std::vector<float> memory(count * line, 0.f);
    Matrix scores{memory.data(), count, keys, line, 1}, left = matrix(q, {batch, head}), right = head_of(k, batch, head);
    left.data = left.at(first, 0);
    product(left, {right.data, right.columns, right.rows, right.column, right.row}, scores, {}, factor, false);
    for (int64_t i = 0; i < count; i++) {
      float* row = scores.at(i, 0);
      if (mask) {
        int64_t last = mask->rank() - 1;
        const float* added = mask->floats() + (first + i) * mask->step(last - 1) + (last == 3 ? batch * mask->step(0) + head * mask->step(1) : 0);
        int64_t j = 0;
        if (mask->step(last) == 1)
          for (; j + LANES <= keys; j += LANES) *reinterpret_cast<Unaligned*>(row + j) += *reinterpret_cast<const Unaligned*>(added + j);
        for (; j < keys; j++) row[j] += added[j * mask->step(last)];
      }
      std::fill(row + (causal ? std::min<int64_t>(keys, first + i + 1) : keys), row + line, NONE);
      softmax(row, line);
    }
    Matrix target = matrix(out, {batch, head});
    target.data = target.at(first, 0);
    target.rows = count;
    product(scores, head_of(v, batch, head), target, {}, 1.f, false);
  }
  return AOTI_TORCH_SUCCESS;
}

// A convolution of images as a product: for a band of output positions, the inputs under each position are a row.  The memory
// format is that of torch with oneDNN: channels last if the images or the weight are.
AOTITorchError aoti_torch_cpu_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* stride, int64_t stride_len, const int64_t* padding, int64_t, const int64_t* dilation, int64_t, int32_t transposed, const int64_t*, int64_t, int64_t groups, AtenTensorHandle* ret0) {
  const Tensor &x = of(input), &w = of(weight);
  const Tensor* added = bias && *bias ? &of(*bias) : nullptr;
  if (transposed || groups != 1 || stride_len != 2 || !all_floats({&x, &w}, 4) || (added && !all_floats({added}, 1)) || w.sizes[1] != x.sizes[1]) return AOTI_TORCH_FAILURE;
  int64_t channels = w.sizes[1], high = w.sizes[2], wide = w.sizes[3], depth = channels * high * wide, out_channels = w.sizes[0];
  int64_t sizes[] = {x.sizes[0], out_channels, 0, 0};
  for (int64_t axis = 0; axis < 2; axis++) sizes[axis + 2] = (x.sizes[axis + 2] + 2 * padding[axis] - dilation[axis] * (w.sizes[axis + 2] - 1) - 1) / stride[axis] + 1;
  int64_t places = sizes[2] * sizes[3];
  bool last = channels_last(x) || channels_last(w);
  int64_t strides[] = {places * out_channels, last ? 1 : places, last ? sizes[3] * out_channels : sizes[3], last ? out_channels : 1};
  auto follows = [&](int64_t axis, int64_t step) { return w.sizes[axis] == 1 || w.strides[axis] == step; };
  bool inside = follows(1, 1) && follows(3, channels) && follows(2, wide * channels);  // whether channels are innermost in a row
  if (!inside && !(follows(3, 1) && follows(2, wide) && follows(1, high * wide))) return AOTI_TORCH_FAILURE;
  if (allocated(4, sizes, strides, FLOAT, ret0)) return AOTI_TORCH_FAILURE;
  const Tensor& out = of(*ret0);
  Matrix b{w.floats(), depth, out_channels, 1, w.strides[0]};
  std::shared_ptr<float> panels = kept_panels(b);
  if (!panels) panels = packed(b);
  // With channels last, the results of all images are rows of one matrix, and a band covers several images.
  int64_t parts = last ? 1 : std::max<int64_t>(1, sizes[0]), line = places * sizes[0] / parts, threads = omp_get_max_threads();
  int64_t band = std::min<int64_t>(BAND, std::max<int64_t>(ROWS, places * sizes[0] / threads / ROWS * ROWS)), bands = (line + band - 1) / band;
  // whether the images already have the layout of the rows, so that nothing is copied
  bool plain = inside && high * wide == 1 && stride[0] * stride[1] == 1 && padding[0] + padding[1] == 0 && x.step(1) <= 1 && x.strides[2] == x.sizes[3] * x.strides[3] && (parts > 1 || sizes[0] == 1 || x.strides[0] == x.sizes[2] * x.strides[2]);
  auto rows_of = [&](int64_t first, int64_t count, float* row) {
    for (int64_t place = first; place < first + count; place++) {
      const float* from = x.floats() + place / places * x.strides[0];
      auto value = [&](int64_t channel, int64_t y, int64_t at) {
        return y < 0 || at < 0 || y >= x.sizes[2] || at >= x.sizes[3] ? 0.f : from[channel * x.strides[1] + y * x.strides[2] + at * x.strides[3]];
      };
      int64_t within = place % places, top = within / sizes[3] * stride[0] - padding[0], left = within % sizes[3] * stride[1] - padding[1];
      if (inside)
        for (int64_t i = 0; i < high; i++)
          for (int64_t j = 0; j < wide; j++, row += channels) {
            int64_t y = top + i * dilation[0], at = left + j * dilation[1];
            if (x.strides[1] == 1 && y >= 0 && at >= 0 && y < x.sizes[2] && at < x.sizes[3])
              std::memcpy(row, from + y * x.strides[2] + at * x.strides[3], channels * sizeof(float));
            else
              for (int64_t channel = 0; channel < channels; channel++) row[channel] = value(channel, y, at);
          }
      else
        for (int64_t channel = 0; channel < channels; channel++)
          for (int64_t i = 0; i < high; i++)
            for (int64_t j = 0; j < wide; j++) *row++ = value(channel, top + i * dilation[0], left + j * dilation[1]);
    }
  };
  bool enough = true;
#pragma omp parallel
  {
    std::unique_ptr<float[]> rows(plain ? nullptr : new (std::nothrow) float[band * depth]);
    if (!plain && !rows) {
#pragma omp atomic write
      enough = false;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < parts * bands; task++) {
      if (!plain && !rows) continue;
      int64_t part = task / bands, first = task % bands * band, count = std::min(band, line - first), step = last ? out_channels : 1;
      if (!plain) rows_of(part * line + first, count, rows.get());
      Matrix a = plain ? Matrix{x.floats() + part * x.strides[0] + first * x.strides[3], count, depth, x.strides[3], 1} : Matrix{rows.get(), count, depth, depth, 1};
      Matrix c{out.floats() + part * strides[0] + first * step, count, out_channels, step, strides[1]};
      Added from_bias{added ? added->floats() : nullptr, 0, added ? added->step(0) : 0};
      for (int64_t j = 0; j < out_channels; j += COLUMNS) panel_product(a, b, c, from_bias, 0, count, j, 1.f, panels.get());
    }
  }
  if (!enough) {
    aoti_torch_delete_tensor_object(*ret0);
    return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

// The cumulative sums along an axis, as in torch: integers as int64, floats in double precision.
AOTITorchError aoti_torch_cpu_cumsum(AtenTensorHandle self, int64_t dim, int32_t* dtype, AtenTensorHandle* ret0) {
  const Tensor& from = of(self);
  int32_t result_dtype = from.dtype == FLOAT ? FLOAT : INT64;
  if (dtype && *dtype != result_dtype) return AOTI_TORCH_FAILURE;
  int64_t axis = axis_of(from, dim), length = from.rank() ? from.sizes[axis] : 1, stride = from.rank() ? from.strides[axis] : 0;
  if (row_major(from.sizes, result_dtype, ret0)) return AOTI_TORCH_FAILURE;
  auto sums = [&](auto* input, auto* output, auto zero) {
    lines(from, axis, length, [&](int64_t source, int64_t target, int64_t step) {
      auto running = zero;
      for (int64_t index = 0; index < length; index++) {
        running += input[source + index * stride];
        output[target + index * step] = static_cast<std::remove_reference_t<decltype(*output)>>(running);
      }
    });
    return AOTI_TORCH_SUCCESS;
  };
  auto* integers = reinterpret_cast<int64_t*>(of(*ret0).data());
  if (from.dtype == FLOAT) return sums(from.floats(), of(*ret0).floats(), 0.0);
  if (from.dtype == INT64) return sums(reinterpret_cast<int64_t*>(from.data()), integers, int64_t{0});
  if (from.dtype == INT32) return sums(reinterpret_cast<int32_t*>(from.data()), integers, int64_t{0});
  if (from.dtype == BOOL) return sums(reinterpret_cast<uint8_t*>(from.data()), integers, int64_t{0});
  aoti_torch_delete_tensor_object(*ret0);
  return AOTI_TORCH_FAILURE;
}

// The k largest or smallest values along an axis; NaN is the largest.  Uses the functions of the C++ library that torch uses, so
// that ties are resolved as in torch.
AOTITorchError aoti_torch_cpu_topk(AtenTensorHandle self, int64_t k, int64_t dim, int32_t largest, int32_t sorted, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  const Tensor& from = of(self);
  int64_t axis = axis_of(from, dim), length = from.rank() ? from.sizes[axis] : 1, stride = from.rank() ? from.strides[axis] : 0;
  if ((from.dtype != FLOAT && from.dtype != BFLOAT16) || k < 0 || k > length) return AOTI_TORCH_FAILURE;
  auto sizes = from.sizes;
  if (from.rank()) sizes[axis] = k;
  else k = 1;  // for a tensor of no axes, torch returns one number for every k
  if (row_major(sizes, from.dtype, ret0) || row_major(sizes, INT64, ret1)) return AOTI_TORCH_FAILURE;
  if (k == 0) return AOTI_TORCH_SUCCESS;
  int64_t* places = reinterpret_cast<int64_t*>(of(*ret1).data());
  // a bfloat16 is the upper half of a float32's bits
  auto read = [&](int64_t index) {
    if (from.dtype == FLOAT) return from.floats()[index];
    uint32_t bits = uint32_t{reinterpret_cast<uint16_t*>(from.data())[index]} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  auto write = [&](int64_t index, float value) {
    if (from.dtype == FLOAT) {
      of(*ret0).floats()[index] = value;
      return;
    }
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    reinterpret_cast<uint16_t*>(of(*ret0).data())[index] = static_cast<uint16_t>(bits >> 16);
  };
  typedef std::pair<float, int64_t> Candidate;
  auto larger = [](const Candidate& one, const Candidate& other) { return (std::isnan(one.first) && !std::isnan(other.first)) || one.first > other.first; };
  auto smaller = [](const Candidate& one, const Candidate& other) { return (!std::isnan(one.first) && std::isnan(other.first)) || one.first < other.first; };
  lines(from, axis, k, [&](int64_t source, int64_t target, int64_t step) {
    std::vector<Candidate> candidates(length);
    for (int64_t index = 0; index < length; index++) candidates[index] = {read(source + index * stride), index};
    auto take = [&](auto before) {
      if (k * 64 <= length) {
        std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(), before);
      } else {
        std::nth_element(candidates.begin(), candidates.begin() + k - 1, candidates.end(), before);
        if (sorted) std::sort(candidates.begin(), candidates.begin() + k - 1, before);
      }
    };
    largest ? take(larger) : take(smaller);
    for (int64_t index = 0; index < k; index++) {
      write(target + index * step, candidates[index].first);
      places[target + index * step] = candidates[index].second;
    }
  });
  return AOTI_TORCH_SUCCESS;
}

// The names under which code with torch's vector classes calls Sleef.
#define SLEEF(size, lanes) \
  Lanes<size>::Floats Sleef_expf##lanes##_u10(Lanes<size>::Floats x) { return exponential<size>(x); } \
  Lanes<size>::Floats Sleef_logf##lanes##_u10(Lanes<size>::Floats x) { return logarithm<size>(x); } \
  Lanes<size>::Floats Sleef_log1pf##lanes##_u10(Lanes<size>::Floats x) { return logarithm_of_more<size>(x); } \
  Lanes<size>::Floats Sleef_tanhf##lanes##_u10(Lanes<size>::Floats x) { return hyperbolic_tangent<size>(x); } \
  Lanes<size>::Floats Sleef_sinf##lanes##_u35(Lanes<size>::Floats x) { return sine<size>(x, 0); } \
  Lanes<size>::Floats Sleef_cosf##lanes##_u35(Lanes<size>::Floats x) { return sine<size>(x, 1); }
#if defined(__AVX512F__)
SLEEF(64, 16)
#endif
#if defined(__AVX2__)
SLEEF(32, 8)
#endif
#undef SLEEF

}  // extern "C"
