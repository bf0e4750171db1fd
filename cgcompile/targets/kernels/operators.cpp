// Operators that Inductor's code for the CPU calls: products with int8 weights, and attention over pages.
//
// They use only the C interface of tensors, so they work with tensors of libtorch and with those of standalone.cpp.  A function
// returns an error for arguments that it does not support.

#include <omp.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "products.h"

namespace {

// The properties of a tensor, read through the C interface.
struct View {
  char* data = nullptr;
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;

  explicit View(AtenTensorHandle tensor) {
    void* begin = nullptr;
    if (aoti_torch_get_data_ptr(tensor, &begin) || aoti_torch_get_dim(tensor, &rank) || aoti_torch_get_sizes(tensor, &sizes) || aoti_torch_get_strides(tensor, &strides) || aoti_torch_get_dtype(tensor, &dtype)) rank = -1;
    data = static_cast<char*>(begin);
  }
  bool is(int32_t wanted, int64_t axes) const { return rank == axes && dtype == wanted; }
  bool innermost(int64_t axis) const { return strides[axis] == 1 || sizes[axis] == 1; }
  float* floats() const { return reinterpret_cast<float*>(data); }
  int64_t integer(int64_t index) const { return *reinterpret_cast<const int64_t*>(data + 8 * index * strides[0]); }
};

AOTITorchError row_major(const std::vector<int64_t>& sizes, AtenTensorHandle* result) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t axis = sizes.size(); axis-- > 0; step *= std::max<int64_t>(1, sizes[axis])) strides[axis] = step;
  return aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, result);
}

// --- products with int8 weights -----------------------------------------------------------------------------------------

constexpr int FEW = 4;  // up to this many rows, the weights are multiplied without packing panels
constexpr int PART = 96;  // part of the depth whose products are added up first: the error of a long sum grows with its length
constexpr int64_t SOON = 8192;  // prefetch distance in bytes of weights: the processor does not prefetch several rows at once

typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
typedef int32_t Wide __attribute__((vector_size(BYTES)));

// Converts LANES bytes to floats.  GCC 12 would convert them one by one.
Vector widened(const int8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
#elif defined(__AVX2__)
  return reinterpret_cast<Vector>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))));
#else
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Wide), Vector);
#endif
}

// Returns the sum of all lanes.
template <int width, int... lanes> inline Vector folded(Vector value, std::integer_sequence<int, lanes...>) {
  return value + __builtin_shufflevector(value, value, (lanes ^ width)...);
}
template <int width = LANES / 2> inline float sum(Vector value) {
  value = folded<width>(value, std::make_integer_sequence<int, LANES>());
  if constexpr (width > 1) return sum<width / 2>(value);
  return value[0];
}

// Multiplies `count` rows of x by `columns` rows of the weights from row j on, into out[row * out_row + j].
template <int count, int columns> void dots(const Matrix& x, int64_t first, const int8_t* weight, const float* scale, int64_t j, float* out, int64_t out_row) {
  int64_t depth = x.columns, p = 0;
  const int8_t* rows = weight + j * depth;
  Vector sums[count][columns] = {};
  for (; p + LANES <= depth; p += LANES) {
    Vector left[count];
    for (int r = 0; r < count; r++) left[r] = *reinterpret_cast<const Unaligned*>(x.at(first + r, p));
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) {
      if (p % ALIGNMENT == 0) __builtin_prefetch(rows + c * depth + p + SOON);
      Vector right = widened(rows + c * depth + p);
      for (int r = 0; r < count; r++) sums[r][c] += left[r] * right;
    }
  }
  for (int r = 0; r < count; r++)
    for (int c = 0; c < columns; c++) {
      float total = sum(sums[r][c]);
      for (int64_t rest = p; rest < depth; rest++) total += *x.at(first + r, rest) * rows[c * depth + rest];
      out[(first + r) * out_row + j + c] = total * scale[j + c];
    }
}

template <int count> void few_rows(const Matrix& x, int64_t first, const int8_t* weight, const float* scale, int64_t begin, int64_t end, float* out, int64_t out_row) {
  constexpr int SIDE = count == 1 ? 8 : 4;
  int64_t j = begin;
  for (; j + SIDE <= end; j += SIDE) dots<count, SIDE>(x, first, weight, scale, j, out, out_row);
  for (; j < end; j++) dots<count, 1>(x, first, weight, scale, j, out, out_row);
}

// Packs COLUMNS columns of the transposed weights, times their scales, from column j on, rows [begin, end).  Missing columns are 0.
void pack_bytes(const int8_t* weight, const float* scale, int64_t count, int64_t depth, int64_t begin, int64_t end, int64_t j, float* panel) {
  int64_t columns = std::min<int64_t>(COLUMNS, count - j), p = begin;
  if (columns == COLUMNS) {
    for (; p + LANES <= end; p += LANES)
      for (int64_t c = 0; c < COLUMNS; c += LANES) {
        Vector rows[LANES];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) {
          const int8_t* from = weight + (j + c + lane) * depth + p;
          __builtin_prefetch(from + 2 * ALIGNMENT);
          rows[lane] = widened(from) * scale[j + c + lane];
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) *reinterpret_cast<Vector*>(panel + (p - begin + lane) * COLUMNS + c) = rows[lane];
      }
  } else {
    std::fill(panel, panel + (end - begin) * COLUMNS, 0.f);
  }
  for (; p < end; p++)
    for (int64_t c = 0; c < columns; c++) panel[(p - begin) * COLUMNS + c] = weight[(j + c) * depth + p] * scale[j + c];
}

// Computes out[:, j:j+COLUMNS] for all rows, in tiles of nearly equal height.
void many_rows(const Matrix& x, const int8_t* weight, const float* scale, int64_t j, const Matrix& out) {
  alignas(ALIGNMENT) thread_local float panel[PART * COLUMNS];
  int64_t parts = (x.rows + ROWS - 1) / ROWS;
  for (int64_t begin = 0; begin < x.columns; begin += PART) {
    int64_t end = std::min<int64_t>(x.columns, begin + PART);
    pack_bytes(weight, scale, out.columns, x.columns, begin, end, j, panel);
    for (int64_t part = 0; part < parts; part++) {
      int64_t from = x.rows * part / parts, to = x.rows * (part + 1) / parts;
      TILES[to - from - 1](x, from, begin, end, panel, out, {}, j, 1.f);
    }
  }
}

// --- attention over pages -----------------------------------------------------------------------------------------------

constexpr int TILE = 6;  // queries that share one pass over keys and values

struct Scores {
  float scale, softcap;
  int64_t window, chunk;
};

// A query: its values, the address of its result, and the range [first, last) of tokens that it attends to.
struct Query {
  const float* data;
  float* out;
  int64_t first, last;
  float sink;
};

// The keys and values of one head of one lane (a sequence of the batch), by its block table.
struct Pages {
  const char* table;
  int64_t table_step, size, dim;
  const float *keys, *values;
  int64_t key_page, key_token, value_page, value_token;
  int64_t page(int64_t token) const { return *reinterpret_cast<const int64_t*>(table + 8 * table_step * (token / size)); }
  const float* key(int64_t token) const { return keys + page(token) * key_page + token % size * key_token; }
  const float* value(int64_t token) const { return values + page(token) * value_page + token % size * value_token; }
};

// Packs keys of tokens [first, last) in groups of LANES: packed[token / LANES][dimension][lane], with zeros after the last token.
void pack_keys(const Pages& pages, int64_t first, int64_t last, float* packed) {
  for (int64_t token = first; token < last; token += LANES, packed += pages.dim * LANES) {
    int64_t count = std::min<int64_t>(LANES, last - token), d = 0;
    if (count == LANES && pages.size % LANES == 0)
      for (const float* from = pages.key(token); d + LANES <= pages.dim; d += LANES) {
        Vector rows[LANES];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) rows[lane] = *reinterpret_cast<const Unaligned*>(from + lane * pages.key_token + d);
        transpose(rows);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) *reinterpret_cast<Vector*>(packed + (d + lane) * LANES) = rows[lane];
      }
    for (int64_t lane = 0; lane < LANES; lane++) {
      const float* from = lane < count ? pages.key(token + lane) : nullptr;
      for (int64_t rest = d; rest < pages.dim; rest++) packed[rest * LANES + lane] = from ? from[rest] : 0;
    }
  }
}

// Attention of `count` queries to tokens [first, last), whose keys are packed.  `scores`: memory for `count` times `line` floats.
template <int count> void attend(const Query* queries, const Pages& pages, const Scores& how, int64_t first, int64_t last, const float* packed, float* scores, int64_t line) {
  Wide lanes;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
  for (int64_t token = first; token < last; token += LANES, packed += pages.dim * LANES) {
    Vector sums[count] = {};
    for (int64_t d = 0; d < pages.dim; d++) {
      Vector key = *reinterpret_cast<const Vector*>(packed + d * LANES);
      for (int r = 0; r < count; r++) sums[r] += queries[r].data[d] * key;
    }
    Wide place = lanes + static_cast<int32_t>(token);
    for (int r = 0; r < count; r++) {
      Vector score = sums[r] * how.scale;
      if (how.softcap != 0) score = how.softcap * hyperbolic_tangent<BYTES>(score / how.softcap);
      score = (place >= static_cast<int32_t>(queries[r].first)) & (place < static_cast<int32_t>(queries[r].last)) ? score : Vector{} + NONE;
      *reinterpret_cast<Unaligned*>(scores + r * line + token - first) = score;
    }
  }
  float share[count];
  for (int r = 0; r < count; r++) {
    Unaligned* row = reinterpret_cast<Unaligned*>(scores + r * line);
    Vector highest = Vector{} + queries[r].sink, sums{};
    for (int64_t at = 0; at < line / LANES; at++) highest = row[at] > highest ? row[at] : highest;
    float most = NONE, total = 0;
    for (int lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]);
    if (most == NONE) most = 0;
    for (int64_t at = 0; at < line / LANES; at++) sums += row[at] = exponential<BYTES>(row[at] - most);
    total = sum(sums) + (queries[r].sink == NONE ? 0 : std::exp(queries[r].sink - most));
    share[r] = total > 0 ? 1 / total : 0;
  }
  int64_t d = 0;
  for (; d + LANES <= pages.dim; d += LANES) {
    Vector sums[count] = {};
    for (int64_t token = first; token < last;) {
      const float* value = pages.value(token) + d;
      Vector of_page[count] = {};
      for (int64_t end = std::min(last, (token / pages.size + 1) * pages.size); token < end; token++, value += pages.value_token)
        for (int r = 0; r < count; r++) of_page[r] += scores[r * line + token - first] * *reinterpret_cast<const Unaligned*>(value);
      for (int r = 0; r < count; r++) sums[r] += of_page[r];
    }
    for (int r = 0; r < count; r++) *reinterpret_cast<Unaligned*>(queries[r].out + d) = sums[r] * share[r];
  }
  for (; d < pages.dim; d++)
    for (int r = 0; r < count; r++) {
      float sum_of_values = 0;
      for (int64_t token = first; token < last; token++) sum_of_values += scores[r * line + token - first] * pages.value(token)[d];
      queries[r].out[d] = sum_of_values * share[r];
    }
}

typedef void (*Attend)(const Query*, const Pages&, const Scores&, int64_t, int64_t, const float*, float*, int64_t);
template <int... counts> constexpr std::array<Attend, sizeof...(counts)> attends(std::integer_sequence<int, counts...>) { return {attend<counts + 1>...}; }
constexpr auto ATTENDS = attends(std::make_integer_sequence<int, TILE>());

// Runs all queries of a lane that share a head of keys, in the order of their positions.
void attend_all(const std::vector<Query>& queries, const Pages& pages, const Scores& how) {
  int64_t first = queries.front().first / LANES * LANES, last = queries.back().last;
  int64_t line = (last - first + LANES - 1) / LANES * LANES;
  std::unique_ptr<float, void (*)(void*)> memory(static_cast<float*>(std::aligned_alloc(ALIGNMENT, line * (pages.dim + TILE) * sizeof(float))), std::free);
  if (!memory) throw std::bad_alloc();
  float *packed = memory.get(), *scores = packed + line * pages.dim;
  pack_keys(pages, first, last, packed);
  for (size_t at = 0; at < queries.size(); at += TILE) {
    int64_t count = std::min<int64_t>(TILE, queries.size() - at);
    int64_t begin = queries[at].first / LANES * LANES, end = queries[at + count - 1].last;
    int64_t length = (end - begin + LANES - 1) / LANES * LANES;
    ATTENDS[count - 1](&queries[at], pages, how, begin, end, packed + (begin - first) * pages.dim, scores, length);
  }
}

}  // namespace

extern "C" {

// x (rows, depth) times the transpose of weight (count, depth), each column times its scale -> (rows, count).
AOTITorchError aoti_torch_cpu_int8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle* ret0) {
  View from(x), bytes(weight), scales(scale);
  int32_t floats = aoti_torch_dtype_float32();
  if (!from.is(floats, 2) || !bytes.is(aoti_torch_dtype_int8(), 2) || !scales.is(floats, 1)) return AOTI_TORCH_FAILURE;
  int64_t rows = from.sizes[0], depth = from.sizes[1], count = bytes.sizes[0];
  if (bytes.sizes[1] != depth || scales.sizes[0] != count || !from.innermost(1) || !bytes.innermost(1) || !scales.innermost(0) || (count > 1 && bytes.strides[0] != depth)) return AOTI_TORCH_FAILURE;
  if (row_major({rows, count}, ret0)) return AOTI_TORCH_FAILURE;
  float* out = View(*ret0).floats();
  Matrix left{from.floats(), rows, depth, from.strides[0], 1}, right{out, rows, count, count, 1};
  const int8_t* weights = reinterpret_cast<const int8_t*>(bytes.data);
  int64_t panels = (count + COLUMNS - 1) / COLUMNS, threads = rows * count * depth < WORTH_THREADS ? 1 : omp_get_max_threads();
  if (depth == 0) std::fill(out, out + rows * count, 0.f);
  auto columns = [&](int64_t begin, int64_t end) {  // computes panels [begin, end)
    if (rows > FEW) {
      for (int64_t panel = begin; panel < end; panel++) many_rows(left, weights, scales.floats(), panel * COLUMNS, right);
      return;
    }
    constexpr decltype(&few_rows<1>) FUNCTIONS[] = {few_rows<1>, few_rows<2>, few_rows<3>, few_rows<4>};
    static_assert(std::size(FUNCTIONS) == FEW);
    if (rows) FUNCTIONS[rows - 1](left, 0, weights, scales.floats(), begin * COLUMNS, std::min(count, end * COLUMNS), out, count);
  };
  if (threads == 1) {
    columns(0, panels);
    return AOTI_TORCH_SUCCESS;
  }
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < threads; part++) columns(panels * part / threads, panels * (part + 1) / threads);
  return AOTI_TORCH_SUCCESS;
}

// query (batch, seq, heads, dim), keys and values (pages, key heads, page, dim), pages (batch, blocks), start and count (batch,) ->
// (batch, seq, heads, dim).  Only the first `count` tokens of a lane are computed; the other results are 0.  Token i is at position
// start + i.  It attends to the positions up to its own: the last `window` of them (0: all), or those since the last multiple of
// `chunk` (0: all).  `checked`: the caller has checked the numbers of the pages, which may exceed the sizes of `keys`.
AOTITorchError aoti_torch_cpu_paged_attention(AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle pages, AtenTensorHandle start, AtenTensorHandle count, AtenTensorHandle* sinks, double scale, int64_t window, int64_t chunk, double softcap, int64_t checked, AtenTensorHandle* ret0) {
  View q(query), k(keys), v(values), table(pages), starts(start), counts(count);
  int32_t floats = aoti_torch_dtype_float32(), integers = aoti_torch_dtype_int64();
  if (!q.is(floats, 4) || !k.is(floats, 4) || !v.is(floats, 4) || !table.is(integers, 2) || !starts.is(integers, 1) || !counts.is(integers, 1)) return AOTI_TORCH_FAILURE;
  int64_t batch = q.sizes[0], seq = q.sizes[1], heads = q.sizes[2], dim = q.sizes[3], key_heads = k.sizes[1], size = k.sizes[2];
  for (int64_t axis = 0; axis < 4; axis++)
    if (k.sizes[axis] != v.sizes[axis]) return AOTI_TORCH_FAILURE;
  if (k.sizes[3] != dim || key_heads == 0 || heads % key_heads || !q.innermost(3) || !k.innermost(3) || !v.innermost(3)) return AOTI_TORCH_FAILURE;
  if (table.sizes[0] != batch || starts.sizes[0] != batch || counts.sizes[0] != batch) return AOTI_TORCH_FAILURE;
  const float* sink = nullptr;
  int64_t sink_step = 0, groups = heads / key_heads, longest = 0;
  if (sinks && *sinks) {
    View sink_view(*sinks);
    if (!sink_view.is(floats, 1) || sink_view.sizes[0] != heads) return AOTI_TORCH_FAILURE;
    sink = sink_view.floats();
    sink_step = sink_view.strides[0];
  }
  for (int64_t lane = 0; lane < batch; lane++) {
    int64_t begin = starts.integer(lane), number = counts.integer(lane);
    if (begin < 0 || number < 0 || number > seq || begin + number > table.sizes[1] * size) return AOTI_TORCH_FAILURE;
    for (int64_t block = 0; number && block * size < begin + number; block++) {
      int64_t page = reinterpret_cast<const int64_t*>(table.data)[lane * table.strides[0] + block * table.strides[1]];
      if (page < 0 || (!checked && page >= k.sizes[0])) return AOTI_TORCH_FAILURE;
    }
    longest = std::max(longest, number ? begin + number : 0);
  }
  if (longest > std::numeric_limits<int32_t>::max() - LANES || row_major({batch, seq, heads, dim}, ret0)) return AOTI_TORCH_FAILURE;
  float* out = View(*ret0).floats();
  std::fill(out, out + batch * seq * heads * dim, 0.f);
  Scores how{static_cast<float>(scale), static_cast<float>(softcap), window, chunk};
  bool enough = true;
#pragma omp parallel for schedule(dynamic, 1) if (batch * seq * heads * dim * longest > WORTH_THREADS)
  for (int64_t task = 0; task < batch * key_heads; task++) {
    int64_t lane = task / key_heads, head = task % key_heads, number = counts.integer(lane);
    if (number == 0) continue;
    Pages mine{table.data + 8 * lane * table.strides[0], table.strides[1], size, dim, k.floats() + head * k.strides[1], v.floats() + head * v.strides[1], k.strides[0], k.strides[2], v.strides[0], v.strides[2]};
    try {
      std::vector<Query> queries(number * groups);
      for (int64_t i = 0; i < number; i++)
        for (int64_t group = 0; group < groups; group++) {
          int64_t place = starts.integer(lane) + i, query_head = head * groups + group, first = 0;
          if (window) first = std::max<int64_t>(first, place - window + 1);
          if (chunk) first = std::max(first, place - place % chunk);
          queries[i * groups + group] = {q.floats() + lane * q.strides[0] + i * q.strides[1] + query_head * q.strides[2], out + ((lane * seq + i) * heads + query_head) * dim, first, place + 1, sink ? sink[query_head * sink_step] : NONE};
        }
      attend_all(queries, mine, how);
    } catch (const std::bad_alloc&) {
#pragma omp atomic write
      enough = false;
    }
  }
  if (enough) return AOTI_TORCH_SUCCESS;
  aoti_torch_delete_tensor_object(*ret0);
  return AOTI_TORCH_FAILURE;
}

}  // extern "C"
