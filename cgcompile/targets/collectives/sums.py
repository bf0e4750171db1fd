"""PTX that adds numbers of a dtype in float32, in the order of the ranks."""

from __future__ import annotations

_NUMBERS = {
    "bfloat16": """  shl.b32 %t, {word}, 16;
  mov.b32 {low}, %t;
  and.b32 %t, {word}, 0xffff0000;
  mov.b32 {high}, %t;
""",
    "float16": """  mov.b32 {{%h0, %h1}}, {word};
  cvt.f32.f16 {low}, %h0;
  cvt.f32.f16 {high}, %h1;
""",
    "float32": "  mov.b32 {low}, {word};\n",
}
"""Converts a word to float32 numbers."""

_ROUNDED = {
    "bfloat16": "  cvt.rn.bf16x2.f32 {word}, {high}, {low};\n",
    "float16": "  cvt.rn.f16x2.f32 {word}, {high}, {low};\n",
    "float32": "  mov.b32 {word}, {low};\n",
}


def add(combine: str, words: int, *, first: bool, word: int = 0) -> str:
    """Returns PTX that adds the numbers in registers %w to the sums in %s.  `first`: copies the numbers instead, which keeps -0."""
    lines = ""
    for place in range(words):
        sums = (f"%s{2 * place}", f"%s{2 * place + 1}")
        low, high = sums if first else ("%v0", "%v1")
        lines += _NUMBERS[combine].format(word=f"%w{word + place}", low=low, high=high)
        if not first:
            pairs = zip(sums[:1] if combine == "float32" else sums, ("%v0", "%v1"), strict=False)
            lines += "".join([f"  add.rn.f32 {total}, {total}, {value};\n" for total, value in pairs])
    return lines


def rounded(combine: str, words: int) -> str:
    """Returns PTX that rounds the sums to words of the dtype, in %w0 and following."""
    line = _ROUNDED[combine]
    return "".join([line.format(word=f"%w{place}", low=f"%s{2 * place}", high=f"%s{2 * place + 1}") for place in range(words)])
