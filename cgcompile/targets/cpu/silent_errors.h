// Included before all else into what AOTInductor writes (see compiler.py).
//
// The generated interface keeps the text of an error for AOTInductorGetLastError, and prints it, with a stack of twenty lines, to
// std::cerr besides.  The runtime raises that text; a library prints nothing on its own.
#pragma once
#include <iostream>

namespace std {
struct cgcompile_silence {
  template <class T>
  const cgcompile_silence& operator<<(const T&) const {
    return *this;
  }
  const cgcompile_silence& operator<<(ostream& (*)(ostream&)) const {
    return *this;
  }
};
inline constexpr cgcompile_silence cgcompile_silent{};
} // namespace std

#define cerr cgcompile_silent
