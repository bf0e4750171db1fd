"""Whether an image is complete, decided by its headers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.validate import host_code
from cgbundle.validate.contents import HEADER, MAGIC, NO_BITS, SECTION, SEGMENT, SHARED_OBJECT, check_elf
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

WHOLE = (GOLDEN / "v1" / "cpu_mlp.cgb" / "host" / "model.so").read_bytes()
OBJECT = WHOLE[: -len(host_code.read(WHOLE) or b"") - 8 - len(host_code.MAGIC)]
CUBINS = sorted((GOLDEN / "v1" / "state.cgb" / "kernels").iterdir())


def test_whole_images_pass() -> None:
    check_elf(OBJECT, "host/model.so", SHARED_OBJECT)
    for path in CUBINS:
        check_elf(path.read_bytes(), path.name)


@given(st.integers(min_value=0, max_value=len(OBJECT) - 1))
def test_no_part_of_one_passes(length: int) -> None:
    with raises("image-invalid", match="^host/model.so: (cut off|not a shared object)") as caught:
        check_elf(OBJECT[:length], "host/model.so", SHARED_OBJECT)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("path", CUBINS, ids=lambda path: path.name[:8])
def test_no_part_of_a_kernel_image_passes(path: Path) -> None:
    image = path.read_bytes()
    for length in range(0, len(image), 61):
        with raises("image-invalid", match="cut off|not an ELF file"):
            check_elf(image[:length], path.name)


@pytest.mark.parametrize("section", [False, True])
@pytest.mark.parametrize(("more", "fits"), [(-1, True), (0, True), (1, False), (1 << 63, False)])
def test_what_a_header_names_ends_where_the_file_does(section: bool, more: int, fits: bool) -> None:
    """The file has the ELF header, one header of a segment or section, and the eight bytes that this second header names."""
    size = (SECTION if section else SEGMENT).size
    counts = (0, 0, 0, size, 1, 0) if section else (0, size, 1, 0, 0, 0)
    head = MAGIC.ljust(16, b"\0") + HEADER.pack(SHARED_OBJECT, 62, 0, HEADER.size, HEADER.size, *counts)[16:]
    begin = HEADER.size + size
    row = SECTION.pack(1, begin, 8 + more) if section else SEGMENT.pack(1, begin, 8 + more)
    data = head + row + bytes(8)
    if fits:
        check_elf(data, "host/model.so", SHARED_OBJECT)
        return
    with raises("image-invalid", match=f"its headers name byte {len(data) + more}, it has {len(data)}"):
        check_elf(data, "host/model.so", SHARED_OBJECT)


def test_a_section_without_bits_may_be_of_any_size() -> None:
    head = MAGIC.ljust(16, b"\0") + HEADER.pack(SHARED_OBJECT, 62, 0, 0, HEADER.size, 0, 0, 0, SECTION.size, 1, 0)[16:]
    check_elf(head + SECTION.pack(NO_BITS, HEADER.size, 1 << 40), "host/model.so", SHARED_OBJECT)
    with raises("image-invalid", match="cut off"):
        check_elf(head + SECTION.pack(NO_BITS, 1 << 40, 0), "host/model.so", SHARED_OBJECT)


def test_a_kernel_image_is_no_shared_object() -> None:
    with raises("image-invalid", match="not a shared object"):
        check_elf(CUBINS[0].read_bytes(), "host/model.so", SHARED_OBJECT)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with raises("image-invalid"):
        check_elf(noise, "host/model.so", SHARED_OBJECT)


@given(st.integers(min_value=0, max_value=63), st.integers(min_value=0, max_value=255))
def test_a_changed_header_is_refused_or_names_what_is_there(at: int, value: int) -> None:
    """Only a refusal may be raised, whatever the numbers are."""
    changed = bytearray(OBJECT)
    changed[at] = value
    try:
        check_elf(bytes(changed), "host/model.so", SHARED_OBJECT)
    except Exception as error:  # noqa: BLE001 (looked at)
        assert getattr(error, "code", "") == "image-invalid", repr(error)
