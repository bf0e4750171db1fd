// Vectors of the width of the target processor, and functions of them.  Every file that includes this header has its own copy.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace {

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

// exp(x): 2^n times a polynomial of the remainder (S. L. Moshier, Cephes, expf.c); error below 2 units in the last place.
template <int size> typename Lanes<size>::Floats exponential(typename Lanes<size>::Floats x) {
  typedef typename Lanes<size>::Ints Ints;
  typename Lanes<size>::Floats none{};
  x = x > 89.f ? none + 89.f : x;  // NaN is kept
  x = x < -104.f ? none - 104.f : x;
  auto shifted = x * 1.44269504088896341f + 12582912.f;  // adding 1.5 * 2^23 puts the rounded integer into the lowest bits
  Ints n = reinterpret_cast<Ints>(shifted) - 0x4B400000;
  auto whole = shifted - 12582912.f;
  auto rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  auto sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.f;
  Ints half = n >> 1;  // two factors of about 2^(n/2): small results become denormal, large ones infinite
  sum *= reinterpret_cast<typename Lanes<size>::Floats>((half + 127) << 23);
  return sum * reinterpret_cast<typename Lanes<size>::Floats>((n - half + 127) << 23);
}

// Applies a function to each lane in double precision, for arguments that the polynomials do not cover.
template <int size> typename Lanes<size>::Floats each_lane(typename Lanes<size>::Floats x, double (*function)(double)) {
  for (int lane = 0; lane < size / 4; lane++) x[lane] = static_cast<float>(function(x[lane]));
  return x;
}

template <int size> bool any(typename Lanes<size>::Ints lanes) {
  int32_t bits = 0;
  for (int lane = 0; lane < size / 4; lane++) bits |= lanes[lane];
  return bits != 0;
}

// Polynomials and range reductions below: S. L. Moshier, Cephes, tanhf.c, logf.c, sinf.c.
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
  power += low;  // adds -1 where low is true
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
  Floats result = part + sum + exponent * 0.693359375f;
  result = x == INFINITE ? x : result;
  result = x == 0 ? none - INFINITE : result;
  return x >= 0 ? result : none + std::numeric_limits<float>::quiet_NaN();
}

// log(1 + x), corrected to first order for the rounding of 1 + x.
template <int size> typename Lanes<size>::Floats logarithm_of_more(typename Lanes<size>::Floats x) {
  auto whole = 1.f + x;
  auto result = logarithm<size>(whole);
  auto corrected = result - ((whole - 1.f) - x) / whole;
  return x == 0 ? x : (result == result) & (whole != 0) & (whole <= std::numeric_limits<float>::max()) ? corrected : result;
}

constexpr float REDUCED = 8192;  // below it, pi / 4 in three parts is precise enough

// sin(x + quarters * pi / 2)
template <int size> typename Lanes<size>::Floats sine(typename Lanes<size>::Floats x, int32_t quarters) {
  typedef typename Lanes<size>::Floats Floats;
  typedef typename Lanes<size>::Ints Ints;
  Floats magnitude = x < 0 ? -x : x;
  if (any<size>(~(magnitude < REDUCED))) return quarters ? each_lane<size>(x, std::cos) : each_lane<size>(x, std::sin);
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
  Floats result = (quarter & 1) != 0 ? even : odd;
  result = (quarter & 2) != 0 ? -result : result;
  return !quarters & (x < 0) ? -result : result;
}

}  // namespace
