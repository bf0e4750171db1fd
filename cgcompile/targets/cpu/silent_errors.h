// Included first into the files that AOTInductor writes (see compiler.py).
//
// The generated interface stores the text of an error for AOTInductorGetLastError.  It also prints the text, with a stack of twenty
// lines, to std::cerr.  The runtime raises the text, and a library should print nothing, so this header discards the output.
//
// torch 2.11 has no such function and only prints.  There this header stores the printed text and defines the function.
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
