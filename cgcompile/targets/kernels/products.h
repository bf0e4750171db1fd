// Products a @ b of float32 matrices: tiles of rows of a times panels of b, two vectors wide, with the sums in registers.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "vectors.h"

namespace {

constexpr int64_t ALIGNMENT = 64;
constexpr int64_t WORTH_THREADS = 1 << 18;  // multiplications; a smaller product ends before another thread has started
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Softmax of a row, whose length is a multiple of LANES.  A row that is NONE everywhere becomes zeros, as in torch.
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

// Transposes LANES vectors of LANES elements in registers: blocks of 1, 2, 4, ... elements are exchanged.
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

// Packs rows [begin, end) of b, from column j on, into a panel of COLUMNS.  Missing columns are 0.  Weights are stored transposed.
// They are prefetched AHEAD elements early, because the processor does not prefetch LANES rows at once.
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

// The addend of a product: factor * data[i * row + j * column], or zeros without data.
struct Added {
  const float* data = nullptr;
  int64_t row = 0, column = 0;
  float factor = 1;
  bool plain() const { return data == nullptr || (column == 1 && factor == 1); }
  float at(int64_t i, int64_t j) const { return data ? factor * data[i * row + j * column] : 0; }
  Vector vector(int64_t i, int64_t j) const { return data ? *reinterpret_cast<const Unaligned*>(data + i * row + j) : Vector{}; }
};

// c = added + alpha * (`count` rows of a, from row i on) @ panel, which has rows [begin, end) of b.  If `begin` is not 0, c itself
// replaces `added`.  The sums are in registers.  Rows of c are pages apart, so they are prefetched before the sums are computed.
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

// c[first:last, j:j+COLUMNS] = added + alpha * a @ b, in tiles of nearly equal height.  `kept`: all packed panels of b, or null.
void panel_product(const Matrix& a, const Matrix& b, const Matrix& c, const Added& added, int64_t first, int64_t last, int64_t j, float alpha, const float* kept) {
  alignas(ALIGNMENT) thread_local float scratch[DEPTH * COLUMNS];
  int64_t rows = last - first, parts = (rows + ROWS - 1) / ROWS, begin = 0;
  do {  // runs once even if b has no rows
    int64_t end = std::min<int64_t>(b.rows, begin + DEPTH);
    const float* panel = kept ? kept + j * b.rows + begin * COLUMNS : scratch;
    if (!kept) pack(b, begin, end, j, scratch);
    for (int64_t part = 0; part < parts; part++) {
      int64_t from = first + rows * part / parts, to = first + rows * (part + 1) / parts;
      TILES[to - from - 1](a, from, begin, end, panel, c, added, j, alpha);
    }
    begin = end;
  } while (begin < b.rows);
}

}  // namespace
