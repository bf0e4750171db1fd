// Included before all else into what AOTInductor writes (see compiler.py).
//
// The generated interface keeps the text of an error for AOTInductorGetLastError, and prints it, with a stack of twenty lines, to
// std::cerr besides.  The runtime raises that text; a library prints nothing on its own.
//
// torch 2.11 has no such function and only prints.  There what is printed is kept, and the function is ours.
#pragma once
#include <iostream>

#ifdef CGCOMPILE_KEEPS_ERRORS
#include <cstdint>
#include <sstream>
#include <string>

inline std::string& cgcompile_error() {
  static thread_local std::string kept;
  return kept;
}

extern "C" __attribute__((weak, used, visibility("default"))) int32_t AOTInductorGetLastError(const char** text) {
  *text = cgcompile_error().c_str();
  return 0;
}

namespace std {
struct cgcompile_silence {
  template <class T>
  const cgcompile_silence& operator<<(const T& value) const {
    ostringstream text;
    text << value;
    if (text.str() == "Error: ") cgcompile_error().clear();
    cgcompile_error() += text.str();
    return *this;
  }
  const cgcompile_silence& operator<<(ostream& (*)(ostream&)) const {
    return *this;
  }
};
#else
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
#endif
inline constexpr cgcompile_silence cgcompile_silent{};
} // namespace std

#define cerr cgcompile_silent
