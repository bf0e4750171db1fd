// What a shared object of AOTInductor calls of libtorch, in the small: tensors; products, convolutions and attention of float32; running
// sums, top-k; functions of vectors.
//
// Linked into the object with -Bsymbolic, so that a process that has torch loaded as well keeps the two apart.  torch's own headers
// declare the functions: where a version of torch changes a signature, this does not compile.  Whatever is missing here stays
// undefined: the build then takes libtorch's, or refuses it by name.  A function that is given something it cannot do returns an error.

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

namespace {

// --- tensors ------------------------------------------------------------------------------------------------------------

// c10::ScalarType, by number: the bytes of an element; 0 for what no bundle holds.
constexpr int64_t WIDTHS[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 2, 4, 8};
constexpr int32_t INT32 = 3, INT64 = 4, FLOAT = 6, BOOL = 11, BFLOAT16 = 15;
constexpr int64_t ALIGNMENT = 64, HUGE_PAGE = 1 << 21;

struct Tensor {
  std::shared_ptr<void> owner;  // null: the memory is the caller's
  char* storage;
  int64_t bytes, offset;  // of the storage; of the first element, in elements
  std::vector<int64_t> sizes, strides;
  int32_t dtype;

  int64_t width() const { return WIDTHS[dtype]; }
  int64_t rank() const { return static_cast<int64_t>(sizes.size()); }
  int64_t count() const {
    int64_t made = 1;
    for (auto size : sizes) made *= size;
    return made;
  }
  char* data() const { return storage + offset * width(); }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  // The stride of an axis, 0 where it has one element: operands are broadcast.
  int64_t step(int64_t axis) const { return sizes[axis] == 1 ? 0 : strides[axis]; }
};

Tensor& of(AtenTensorHandle handle) { return *reinterpret_cast<Tensor*>(handle); }
AtenTensorHandle handle(Tensor made) { return reinterpret_cast<AtenTensorHandle>(new Tensor(std::move(made))); }

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

// No gaps, and no element twice.
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

// Whether pictures lie with their channels innermost, as torch's suggest_memory_format tells it.
bool channels_last(const Tensor& pictures) {
  if (pictures.strides[1] == 0) return false;
  int64_t least = 0;
  for (int64_t axis : {1, 3, 2, 0}) {
    if (pictures.sizes[axis] == 0 || pictures.strides[axis] < least || (axis == 0 && least == pictures.strides[1])) return false;
    least = pictures.strides[axis] * pictures.sizes[axis];
  }
  return true;
}

// The strides of a new tensor like this one, as torch's empty_like gives them and compiled code takes for granted: its own where
// nothing lies between its elements, else its axes in the order of their strides without gaps.  Of axes with equal strides the
// longer one is the outer one; an axis of stride 0 stays among its neighbours.
std::vector<int64_t> strides_like(const Tensor& tensor) {
  if (dense(tensor)) return tensor.strides;
  const auto& sizes = tensor.sizes;
  const auto& given = tensor.strides;
  auto outer = [&](int64_t one, int64_t other) {  // 1: `one` belongs outside of `other`; -1: inside; 0: neither
    if (given[one] == 0 || given[other] == 0) return 0;
    if (given[one] != given[other]) return given[one] > given[other] ? 1 : -1;
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

int64_t axis_of(const Tensor& tensor, int64_t given) { return given < 0 ? given + tensor.rank() : given; }

AOTITorchError row_major(const std::vector<int64_t>& sizes, int32_t dtype, AtenTensorHandle* result) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t axis = sizes.size(); axis-- > 0; step *= std::max<int64_t>(1, sizes[axis])) strides[axis] = step;
  return allocated(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, result);
}

// Calls `each` for every line along an axis: with where it begins, in elements, and with where and in which steps it lies in a
// row-major tensor of as many lines, of `length` elements.
template <typename Each> void lines(const Tensor& from, int64_t axis, int64_t length, Each each) {
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
    each(source, line / inner * inner * length + line % inner, inner);
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

// --- vectors ------------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 12;
#elif defined(__AVX__)
constexpr int BYTES = 32, ROWS = 6;
#else
constexpr int BYTES = 16, ROWS = 6;
#endif
constexpr int LANES = BYTES / 4, COLUMNS = 2 * LANES, DEPTH = 384, BAND = 8 * ROWS, AHEAD = 2 * LANES;

template <int size> struct Lanes {
  typedef float Floats __attribute__((vector_size(size)));
  typedef int32_t Ints __attribute__((vector_size(size)));
};
typedef Lanes<BYTES>::Floats Vector;
typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4)));

// exp(x): 2^n times a polynomial of the rest (S. L. Moshier, Cephes, expf.c); error below 2 units in the last place.
template <int size> typename Lanes<size>::Floats exponential(typename Lanes<size>::Floats x) {
  typedef typename Lanes<size>::Ints Ints;
  typename Lanes<size>::Floats none{};
  x = x > 89.f ? none + 89.f : x;  // NaN stays
  x = x < -104.f ? none - 104.f : x;
  auto shifted = x * 1.44269504088896341f + 12582912.f;  // 1.5 * 2^23: the rounded number stands in the lowest digits
  Ints n = reinterpret_cast<Ints>(shifted) - 0x4B400000;
  auto whole = shifted - 12582912.f;
  auto rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  auto sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.f;
  Ints half = n >> 1;  // twice half of the exponent: small results are denormal, large ones infinite
  sum *= reinterpret_cast<typename Lanes<size>::Floats>((half + 127) << 23);
  return sum * reinterpret_cast<typename Lanes<size>::Floats>((n - half + 127) << 23);
}

// Each lane by itself, in double precision: for what the polynomials are not for.
template <int size> typename Lanes<size>::Floats each(typename Lanes<size>::Floats x, double (*function)(double)) {
  for (int lane = 0; lane < size / 4; lane++) x[lane] = static_cast<float>(function(x[lane]));
  return x;
}

template <int size> bool any(typename Lanes<size>::Ints lanes) {
  int32_t found = 0;
  for (int lane = 0; lane < size / 4; lane++) found |= lanes[lane];
  return found != 0;
}

// Polynomials and reductions of what follows: S. L. Moshier, Cephes, tanhf.c, logf.c, sinf.c.
template <int size> typename Lanes<size>::Floats hyperbolic_tangent(typename Lanes<size>::Floats x) {
  auto magnitude = x < 0 ? -x : x;
  auto square = x * x;
  auto sum = square * -5.70498872745e-3f + 2.06390887954e-2f;
  sum = sum * square - 5.37397155531e-2f;
  sum = sum * square + 1.33314422036e-1f;
  sum = sum * square - 3.33332819422e-1f;
  auto small = sum * square * x + x;
  auto large = 1.f - 2.f / (exponential<size>(magnitude + magnitude) + 1.f);
  return x == 0 ? x : magnitude < 0.625f ? small : x < 0 ? -large : large;
}

template <int size> typename Lanes<size>::Floats logarithm(typename Lanes<size>::Floats x) {
  typedef typename Lanes<size>::Floats Floats;
  typedef typename Lanes<size>::Ints Ints;
  constexpr float INFINITE = std::numeric_limits<float>::infinity(), NORMAL = std::numeric_limits<float>::min();
  Floats none{};
  Ints denormal = x < NORMAL;
  Floats scaled = denormal ? x * 33554432.f : x;  // 2^25
  Ints bits = reinterpret_cast<Ints>(scaled);
  Ints power = (bits >> 23) - 126 - (denormal & 25);
  Floats part = reinterpret_cast<Floats>((bits & 0x007fffff) | 0x3f000000);  // from 0.5 to 1
  Ints low = part < 0.707106781186547524f;
  power += low;  // -1 where it is so
  part = low ? part + part - 1.f : part - 1.f;
  Floats square = part * part, exponent = __builtin_convertvector(power, Floats);
  Floats sum = part * 7.0376836292e-2f - 1.1514610310e-1f;
  sum = sum * part + 1.1676998740e-1f;
  sum = sum * part - 1.2420140846e-1f;
  sum = sum * part + 1.4249322787e-1f;
  sum = sum * part - 1.6668057665e-1f;
  sum = sum * part + 2.0000714765e-1f;
  sum = sum * part - 2.4999993993e-1f;
  sum = sum * part + 3.3333331174e-1f;
  sum = sum * part * square - exponent * 2.12194440e-4f - 0.5f * square;
  Floats made = part + sum + exponent * 0.693359375f;
  made = x == INFINITE ? x : made;
  made = x == 0 ? none - INFINITE : made;
  return x >= 0 ? made : none + std::numeric_limits<float>::quiet_NaN();
}

// What is lost in 1 + x, to the first order.
template <int size> typename Lanes<size>::Floats logarithm_of_more(typename Lanes<size>::Floats x) {
  auto whole = 1.f + x;
  auto made = logarithm<size>(whole);
  auto mended = made - ((whole - 1.f) - x) / whole;
  return x == 0 ? x : (made == made) & (whole != 0) & (whole <= std::numeric_limits<float>::max()) ? mended : made;
}

constexpr float REDUCED = 8192;  // below it three parts of pi / 4 are enough

// sin(x + quarters * pi / 2)
template <int size> typename Lanes<size>::Floats sine(typename Lanes<size>::Floats x, int32_t quarters) {
  typedef typename Lanes<size>::Floats Floats;
  typedef typename Lanes<size>::Ints Ints;
  Floats magnitude = x < 0 ? -x : x;
  if (any<size>(~(magnitude < REDUCED))) return quarters ? each<size>(x, std::cos) : each<size>(x, std::sin);
  Ints eighths = __builtin_convertvector(magnitude * 1.27323954473516f, Ints);
  eighths += eighths & 1;
  Floats turned = __builtin_convertvector(eighths, Floats);
  Floats rest = magnitude - turned * 0.78515625f - turned * 2.4187564849853515625e-4f - turned * 3.77489497744594108e-8f;
  Ints quarter = (eighths >> 1) + quarters;
  Floats square = rest * rest;
  Floats odd = square * -1.9515295891e-4f + 8.3321608736e-3f;
  odd = (odd * square - 1.6666654611e-1f) * square * rest + rest;
  Floats even = square * 2.443315711809948e-5f - 1.388731625493765e-3f;
  even = (even * square + 4.166664568298827e-2f) * square * square - 0.5f * square + 1.f;
  Floats made = (quarter & 1) != 0 ? even : odd;
  made = (quarter & 2) != 0 ? -made : made;
  return !quarters & (x < 0) ? -made : made;
}

// --- products -----------------------------------------------------------------------------------------------------------

constexpr float NONE = -std::numeric_limits<float>::infinity();

// A row of LANES numbers or a multiple; one that is NONE all over becomes zeros, as torch's does.
void softmax(float* row, int64_t length) {
  Vector highest = Vector{} + NONE, sums{};
  for (int64_t j = 0; j < length; j += LANES) {
    Vector value = *reinterpret_cast<Unaligned*>(row + j);
    highest = value > highest ? value : highest;
  }
  float most = NONE, sum = 0;
  for (int lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]);
  if (most == NONE) most = 0;
  for (int64_t j = 0; j < length; j += LANES) sums += *reinterpret_cast<Unaligned*>(row + j) = exponential<BYTES>(*reinterpret_cast<Unaligned*>(row + j) - most);
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  float share = sum == 0 ? 0 : 1 / sum;
  for (int64_t j = 0; j < length; j += LANES) *reinterpret_cast<Unaligned*>(row + j) *= share;
}

struct Matrix {
  float* data;
  int64_t rows, columns, row, column;  // sizes; strides
  float* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// LANES vectors of LANES elements each -> their transpose, in registers: blocks of 1, 2, 4, ... elements change places.
template <int width, int... lanes> inline void exchange(Vector (&rows)[LANES], std::integer_sequence<int, lanes...>) {
#pragma GCC unroll 16
  for (int row = 0; row < LANES; row++) {
    if (row & width) continue;
    Vector first = rows[row], second = rows[row + width];
    rows[row] = __builtin_shufflevector(first, second, (lanes & width ? LANES + lanes - width : lanes)...);
    rows[row + width] = __builtin_shufflevector(first, second, (lanes & width ? LANES + lanes : lanes + width)...);
  }
}

template <int width = 1> inline void transpose(Vector (&rows)[LANES]) {
  exchange<width>(rows, std::make_integer_sequence<int, LANES>());
  if constexpr (2 * width < LANES) transpose<2 * width>(rows);
}

// Rows [begin, end) of b, its columns from j on, as a panel of COLUMNS; what is missing of them is zero.  Weights lie transposed: they
// are read AHEAD of where they are needed, as the processor does not foresee LANES rows at once.
void pack(const Matrix& b, int64_t begin, int64_t end, int64_t j, float* panel) {
  int64_t columns = std::min<int64_t>(COLUMNS, b.columns - j), p = begin;
  if (columns < COLUMNS) std::fill(panel, panel + (end - begin) * COLUMNS, 0.f);
  if (b.row == 1 && columns == COLUMNS) {
    for (int64_t c = 0; c < COLUMNS; c += LANES)
      for (p = begin; p + LANES <= end; p += LANES) {
        Vector rows[LANES];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) {
          __builtin_prefetch(b.at(p, j + c + lane) + AHEAD);
          rows[lane] = *reinterpret_cast<const Unaligned*>(b.at(p, j + c + lane));
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) *reinterpret_cast<Vector*>(panel + (p - begin + lane) * COLUMNS + c) = rows[lane];
      }
  } else if (b.column == 1 && columns == COLUMNS) {
    for (; p < end; p++) std::memcpy(panel + (p - begin) * COLUMNS, b.at(p, j), COLUMNS * sizeof(float));
  }
  for (; p < end; p++)
    for (int64_t c = 0; c < columns; c++) panel[(p - begin) * COLUMNS + c] = *b.at(p, j + c);
}

// What a product is added to: factor * data[i * row + j * column], or zeros where there is no data.
struct Added {
  const float* data = nullptr;
  int64_t row = 0, column = 0;
  float factor = 1;
  bool plain() const { return data == nullptr || (column == 1 && factor == 1); }
  float at(int64_t i, int64_t j) const { return data ? factor * data[i * row + j * column] : 0; }
  Vector vector(int64_t i, int64_t j) const { return data ? *reinterpret_cast<const Unaligned*>(data + i * row + j) : Vector{}; }
};

// c = added + alpha * count rows of a, from row i on, times the panel, which has rows [begin, end) of b; c += behind the first panel.  The
// sums are in registers.  Rows of c lie pages apart: they are asked for before they are needed, which is behind the sums.
template <int count> void tile(const Matrix& a, int64_t i, int64_t begin, int64_t end, const float* panel, const Matrix& c, const Added& added, int64_t j, float alpha) {
  Vector sums[count][2] = {};
  const float* factors = a.at(i, begin);
  for (int r = 0; r < count; r++) {
    __builtin_prefetch(c.at(i + r, j), 1);
    __builtin_prefetch(c.at(i + r, j) + LANES, 1);
  }
  for (int64_t p = begin; p < end; p++, panel += COLUMNS, factors += a.column) {
    Vector left = *reinterpret_cast<const Vector*>(panel), right = *reinterpret_cast<const Vector*>(panel + LANES);
    for (int r = 0; r < count; r++) {
      float factor = factors[r * a.row];
      sums[r][0] += factor * left;
      sums[r][1] += factor * right;
    }
  }
  int64_t columns = std::min<int64_t>(COLUMNS, c.columns - j);
  bool fast = columns == COLUMNS && c.column == 1 && (begin || added.plain());
  for (int r = 0; r < count; r++) {
    float* target = c.at(i + r, j);
    if (fast)
      for (int side = 0; side < 2; side++) {
        Unaligned* place = reinterpret_cast<Unaligned*>(target + side * LANES);
        *place = (begin ? *place : added.vector(i + r, j + side * LANES)) + alpha * sums[r][side];
      }
    else
      for (int64_t column = 0; column < columns; column++) {
        float* place = target + column * c.column;
        *place = (begin ? *place : added.at(i + r, j + column)) + alpha * reinterpret_cast<const float*>(sums[r])[column];
      }
  }
}

typedef void (*Tile)(const Matrix&, int64_t, int64_t, int64_t, const float*, const Matrix&, const Added&, int64_t, float);
template <int... counts> constexpr std::array<Tile, sizeof...(counts)> tiles(std::integer_sequence<int, counts...>) { return {tile<counts + 1>...}; }
constexpr auto TILES = tiles(std::make_integer_sequence<int, ROWS>());

// c[first:last, j:j+COLUMNS] = added + alpha * a @ b; the rows in tiles of nearly equal height.  `kept`: all panels of b, or null.
void panel_product(const Matrix& a, const Matrix& b, const Matrix& c, const Added& added, int64_t first, int64_t last, int64_t j, float alpha, const float* kept) {
  alignas(ALIGNMENT) thread_local float own[DEPTH * COLUMNS];
  int64_t rows = last - first, parts = (rows + ROWS - 1) / ROWS, begin = 0;
  do {  // once also where b has no rows
    int64_t end = std::min<int64_t>(b.rows, begin + DEPTH);
    const float* panel = kept ? kept + j * b.rows + begin * COLUMNS : own;
    if (!kept) pack(b, begin, end, j, own);
    for (int64_t part = 0; part < parts; part++) {
      int64_t from = first + rows * part / parts, to = first + rows * (part + 1) / parts;
      TILES[to - from - 1](a, from, begin, end, panel, c, added, j, alpha);
    }
    begin = end;
  } while (begin < b.rows);
}

// --- panels that are kept: of weights, which nobody writes to --------------------------------------------------------------

struct Kept {
  int64_t holders = 0;  // how many have said that the memory is not written to
  int64_t bytes = 0;
  struct Panels {
    bool asked = false;  // once: what is multiplied a single time is not worth memory, and the first call is to be quick
    std::shared_ptr<float> data;
  };
  std::map<std::array<int64_t, 5>, Panels> panels;  // by the layout of a matrix, where it begins first
};

std::mutex keeping;
std::map<const char*, Kept> fixed;  // by where the memory begins

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

// All panels of a matrix in memory that is not written to, from the second time on; else null.
std::shared_ptr<float> kept_panels(const Matrix& b) {
  std::lock_guard<std::mutex> lock(keeping);
  const char* begin = reinterpret_cast<const char*>(b.data);
  auto found = fixed.upper_bound(begin);
  if (found == fixed.begin() || b.rows == 0 || b.columns == 0) return nullptr;
  --found;
  Kept& memory = found->second;
  const char* end = reinterpret_cast<const char*>(b.at(b.rows - 1, b.columns - 1) + 1);
  if (end > found->first + memory.bytes) return nullptr;
  Kept::Panels& panels = memory.panels[{begin - found->first, b.rows, b.columns, b.row, b.column}];
  if (panels.asked && !panels.data) panels.data = packed(b);
  panels.asked = true;
  return panels.data;
}

constexpr int64_t WORTH_THREADS = 1 << 18;  // multiplications; fewer are done before another thread has begun
constexpr int64_t NEAR = 2 << 20;           // bytes of a, at most, that panels pass by: about what a processor has in its own caches
constexpr int64_t FAR = 16 << 20;           // bytes of panels, above which they come from memory for every band

// c = added + alpha * a @ b, band by band of rows: of as many as stay near where panels are kept; else as few bands as there are
// threads for, since each packs its panels anew.
void product(const Matrix& a, const Matrix& b, const Matrix& c, const Added& added, float alpha, bool parallel) {
  int64_t panels = (c.columns + COLUMNS - 1) / COLUMNS, height = std::max<int64_t>(1, c.rows);
  std::shared_ptr<float> kept = parallel ? kept_panels(b) : nullptr;
  int64_t threads = !parallel || c.rows * c.columns * b.rows < WORTH_THREADS ? 1 : omp_get_max_threads();
  if (threads > 1) {
    int64_t wanted = std::max<int64_t>(1, 4 * threads / panels);
    height = std::max<int64_t>(BAND, (c.rows + wanted - 1) / wanted + ROWS - 1) / ROWS * ROWS;
  }
  if (kept && b.rows * b.columns < FAR / static_cast<int64_t>(sizeof(float))) height = std::min(height, std::max<int64_t>(4 * ROWS, NEAR / sizeof(float) / b.rows / ROWS * ROWS));
  int64_t bands = std::max<int64_t>(1, (c.rows + height - 1) / height);
  height = (c.rows + bands * ROWS - 1) / (bands * ROWS) * ROWS;  // as even as tiles allow: a low band has the panels pass by for little
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

// The matrix in the last two axes, at `index` of the axes before.
Matrix matrix(const Tensor& tensor, std::initializer_list<int64_t> index = {}) {
  int64_t axis = 0, start = 0, rank = tensor.rank();
  for (int64_t each : index) start += each * tensor.step(axis++);
  return {tensor.floats() + start, tensor.sizes[rank - 2], tensor.sizes[rank - 1], tensor.strides[rank - 2], tensor.strides[rank - 1]};
}

bool all_floats(std::initializer_list<const Tensor*> tensors, int64_t rank) {
  return std::all_of(tensors.begin(), tensors.end(), [rank](const Tensor* each) { return each->dtype == FLOAT && each->rank() == rank; });
}

// Whether `out` has the sizes of the product of `a` and `b`, matrices or as many of them.
bool multiplies(const Tensor& a, const Tensor& b, const Tensor& out, int64_t rank) {
  if (!all_floats({&a, &b, &out}, rank)) return false;
  bool batches = rank < 3 || (a.sizes[0] == out.sizes[0] && b.sizes[0] == out.sizes[0]);
  return batches && a.sizes[rank - 1] == b.sizes[rank - 2] && out.sizes[rank - 2] == a.sizes[rank - 2] && out.sizes[rank - 1] == b.sizes[rank - 1];
}

// Whether a tensor has the last of these sizes, or 1 there.
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

// Memory that is not written to until it is released as often as it was fixed.
void cgbundle_fix(const char* begin, int64_t bytes) {
  std::lock_guard<std::mutex> lock(keeping);
  Kept& memory = fixed[begin];
  memory.holders++;
  memory.bytes = std::max(memory.bytes, bytes);
}

void cgbundle_release(const char* begin) {
  std::lock_guard<std::mutex> lock(keeping);
  auto found = fixed.find(begin);
  if (found != fixed.end() && --found->second.holders == 0) fixed.erase(found);
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

// As torch: laid out as `self` where that has no gaps, else row-major.
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

// softmax(query @ key^T * scale + mask) @ value, a head at a time in bands of rows; the second result, the logarithms of the sums, is
// for gradients, which compiled inference never reads: it is left as it is.
AOTITorchError aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, double dropout, int32_t causal, AtenTensorHandle* attn_mask, double* scale, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  const Tensor &q = of(query), &k = of(key), &v = of(value);
  const Tensor* mask = attn_mask && *attn_mask ? &of(*attn_mask) : nullptr;
  if (dropout != 0 || !all_floats({&q, &k, &v}, 4) || (mask && !all_floats({mask}, mask->rank() == 2 ? 2 : 4))) return AOTI_TORCH_FAILURE;
  int64_t batches = q.sizes[0], heads = q.sizes[1], rows = q.sizes[2], width = q.sizes[3], keys = k.sizes[2];
  // Groups of query heads share a head of keys and one of values.
  auto lacks = [&](const Tensor& each) { return (each.sizes[0] != batches && each.sizes[0] != 1) || each.sizes[1] == 0 || heads % each.sizes[1] || each.sizes[2] != keys || each.sizes[3] != width; };
  if (lacks(k) || lacks(v) || (mask && !broadcasts(*mask, {batches, heads, rows, keys}))) return AOTI_TORCH_FAILURE;
  auto strides = strides_like(q);
  int64_t sums[] = {batches, rows, heads}, sum_strides[] = {rows * heads, heads, 1};
  if (allocated(4, q.sizes.data(), strides.data(), FLOAT, ret0) || allocated(3, sums, sum_strides, FLOAT, ret1)) return AOTI_TORCH_FAILURE;
  const Tensor& out = of(*ret0);
  auto head_of = [&](const Tensor& each, int64_t batch, int64_t head) { return matrix(each, {batch, head / (heads / each.sizes[1])}); };
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

// A convolution of pictures as a product: of a band of places at a time, what lies under each is a row.  Laid out as torch does with
// oneDNN: channels last where the pictures or the weight are.
AOTITorchError aoti_torch_cpu_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* stride, int64_t stride_len, const int64_t* padding, int64_t, const int64_t* dilation, int64_t, int32_t transposed, const int64_t*, int64_t, int64_t groups, AtenTensorHandle* ret0) {
  const Tensor &x = of(input), &w = of(weight);
  const Tensor* added = bias && *bias ? &of(*bias) : nullptr;
  if (transposed || groups != 1 || stride_len != 2 || !all_floats({&x, &w}, 4) || (added && !all_floats({added}, 1)) || w.sizes[1] != x.sizes[1]) return AOTI_TORCH_FAILURE;
  int64_t channels = w.sizes[1], high = w.sizes[2], wide = w.sizes[3], depth = channels * high * wide, made = w.sizes[0];
  int64_t sizes[] = {x.sizes[0], made, 0, 0};
  for (int64_t axis = 0; axis < 2; axis++) sizes[axis + 2] = (x.sizes[axis + 2] + 2 * padding[axis] - dilation[axis] * (w.sizes[axis + 2] - 1) - 1) / stride[axis] + 1;
  int64_t places = sizes[2] * sizes[3];
  bool last = channels_last(x) || channels_last(w);
  int64_t strides[] = {places * made, last ? 1 : places, last ? sizes[3] * made : sizes[3], last ? made : 1};
  auto follows = [&](int64_t axis, int64_t step) { return w.sizes[axis] == 1 || w.strides[axis] == step; };
  bool inside = follows(1, 1) && follows(3, channels) && follows(2, wide * channels);  // of a row: channels innermost, or outermost
  if (!inside && !(follows(3, 1) && follows(2, wide) && follows(1, high * wide))) return AOTI_TORCH_FAILURE;
  if (allocated(4, sizes, strides, FLOAT, ret0)) return AOTI_TORCH_FAILURE;
  const Tensor& out = of(*ret0);
  Matrix b{w.floats(), depth, made, 1, w.strides[0]};
  std::shared_ptr<float> panels = kept_panels(b);
  if (!panels) panels = packed(b);
  // Where the results of all pictures are rows of one matrix, a band goes over several of them.
  int64_t parts = last ? 1 : std::max<int64_t>(1, sizes[0]), line = places * sizes[0] / parts, threads = omp_get_max_threads();
  int64_t band = std::min<int64_t>(BAND, std::max<int64_t>(ROWS, places * sizes[0] / threads / ROWS * ROWS)), bands = (line + band - 1) / band;
  // pictures that are rows as they lie
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
      int64_t part = task / bands, first = task % bands * band, count = std::min(band, line - first), step = last ? made : 1;
      if (!plain) rows_of(part * line + first, count, rows.get());
      Matrix a = plain ? Matrix{x.floats() + part * x.strides[0] + first * x.strides[3], count, depth, x.strides[3], 1} : Matrix{rows.get(), count, depth, depth, 1};
      Matrix c{out.floats() + part * strides[0] + first * step, count, made, step, strides[1]};
      Added from_bias{added ? added->floats() : nullptr, 0, added ? added->step(0) : 0};
      for (int64_t j = 0; j < made; j += COLUMNS) panel_product(a, b, c, from_bias, 0, count, j, 1.f, panels.get());
    }
  }
  if (!enough) {
    aoti_torch_delete_tensor_object(*ret0);
    return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

// The running sums along an axis, as torch makes them: integers as int64, of floats in double precision.
AOTITorchError aoti_torch_cpu_cumsum(AtenTensorHandle self, int64_t dim, int32_t* dtype, AtenTensorHandle* ret0) {
  const Tensor& from = of(self);
  int32_t wanted = from.dtype == FLOAT ? FLOAT : INT64;
  if (dtype && *dtype != wanted) return AOTI_TORCH_FAILURE;
  int64_t axis = axis_of(from, dim), length = from.rank() ? from.sizes[axis] : 1, stride = from.rank() ? from.strides[axis] : 0;
  if (row_major(from.sizes, wanted, ret0)) return AOTI_TORCH_FAILURE;
  auto sums = [&](auto* given, auto* made, auto zero) {
    lines(from, axis, length, [&](int64_t source, int64_t target, int64_t step) {
      auto running = zero;
      for (int64_t index = 0; index < length; index++) {
        running += given[source + index * stride];
        made[target + index * step] = static_cast<std::remove_reference_t<decltype(*made)>>(running);
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

// The k largest or smallest along an axis, NaN above all else.  By the functions of the C++ library that torch uses, so that of equal
// values the same ones are taken.
AOTITorchError aoti_torch_cpu_topk(AtenTensorHandle self, int64_t k, int64_t dim, int32_t largest, int32_t sorted, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  const Tensor& from = of(self);
  int64_t axis = axis_of(from, dim), length = from.rank() ? from.sizes[axis] : 1, stride = from.rank() ? from.strides[axis] : 0;
  if ((from.dtype != FLOAT && from.dtype != BFLOAT16) || k < 0 || k > length) return AOTI_TORCH_FAILURE;
  auto sizes = from.sizes;
  if (from.rank()) sizes[axis] = k;
  else k = 1;  // torch gives a number of no axes whatever k is
  if (row_major(sizes, from.dtype, ret0) || row_major(sizes, INT64, ret1)) return AOTI_TORCH_FAILURE;
  if (k == 0) return AOTI_TORCH_SUCCESS;
  int64_t* places = reinterpret_cast<int64_t*>(of(*ret1).data());
  // the upper half of a float32's bits is a bfloat16
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
  typedef std::pair<float, int64_t> Found;
  auto larger = [](const Found& one, const Found& other) { return (std::isnan(one.first) && !std::isnan(other.first)) || one.first > other.first; };
  auto smaller = [](const Found& one, const Found& other) { return (!std::isnan(one.first) && std::isnan(other.first)) || one.first < other.first; };
  lines(from, axis, k, [&](int64_t source, int64_t target, int64_t step) {
    std::vector<Found> found(length);
    for (int64_t index = 0; index < length; index++) found[index] = {read(source + index * stride), index};
    auto take = [&](auto before) {
      if (k * 64 <= length) {
        std::partial_sort(found.begin(), found.begin() + k, found.end(), before);
      } else {
        std::nth_element(found.begin(), found.begin() + k - 1, found.end(), before);
        if (sorted) std::sort(found.begin(), found.begin() + k - 1, before);
      }
    };
    largest ? take(larger) : take(smaller);
    for (int64_t index = 0; index < k; index++) {
      write(target + index * step, found[index].first);
      places[target + index * step] = found[index].second;
    }
  });
  return AOTI_TORCH_SUCCESS;
}

// The names by which torch's vectors call Sleef, for what Inductor compiles.
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
