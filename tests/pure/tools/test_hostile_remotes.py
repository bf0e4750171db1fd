"""push and pull with malicious remotes use no path outside the bundle, read no extra byte, and publish no file with an unchecked
hash."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cgbundle.errors import BundleError
from cgbundle.format import file_names, limits
from cgbundle.format.schema import File, Manifest
from cgcompile import pull, push
from cgcompile.bundle import manifest_text
from tests.helpers.bundles.tiny_bundle import write_bundle
from tests.helpers.raising import raises

fsspec: Any = pytest.importorskip("fsspec")

SHA = "ab" * 32
PATHS = [
    "../../victim", "../victim", "..", "host/../../victim", "/victim", "//victim", "", "host//victim", "./victim", "host/.",
    "..\\victim", "\\victim", "host\\..\\..\\victim", "C:\\victim", "victim\0", "victim\n", "v" * 256, "manifest.json",
    "manifest.json.sig", "manifest.json/victim", "host", "weights.safetensors/victim", "Weights.safetensors", "HOST",
    "MANIFEST.json", ".push", ".push/victim", ".PUSH/victim",
]  # fmt: skip
"""Invalid paths for a bundle's files: outside, not plain, reserved, or equal to another except for case."""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tiny.cgb")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    def change(manifest: Manifest) -> Manifest:
        (tmp_path / "other.cgb" / file_names.PROGRAM).write_bytes(b"another one")
        return manifest

    return write_bundle(tmp_path / "other.cgb", change)


@pytest.fixture
def memory() -> Iterator[Any]:
    remote = fsspec.filesystem("memory")
    remote.store.clear()
    remote.pseudo_dirs[:] = [""]
    yield remote
    remote.store.clear()


def same(a: Path, b: Path) -> bool:
    names = manifest_text.list_files(str(a))
    return names == manifest_text.list_files(str(b)) and all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def listing(path: str) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, files=(*manifest.files, File(path=path, bytes=3, sha256=SHA)))


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_no_path_is_made_of_a_manifest_that_lies_there(path: str, bundle: Path, tmp_path: Path) -> None:
    """A push that replaces such a bundle removes no file on either side, and a pull creates no file."""
    far = tmp_path / "deep" / "far" / "m.cgb"
    hostile = write_bundle(tmp_path / "hostile.cgb", listing(path))
    shutil.copytree(hostile, far)
    for place in (tmp_path, far.parent, far.parent.parent):
        (place / "victim").write_bytes(b"mine")
    before = manifest_text.list_files(str(tmp_path))
    with raises("manifest-invalid") as caught:
        push(bundle, str(far), replace=True)
    assert str(caught.value).startswith(f"{far}: ") and "remove what is there yourself" in caught.value.hint
    with raises("manifest-invalid", match="m.cgb: files"):
        pull(str(far), tmp_path / "back.cgb")
    assert manifest_text.list_files(str(tmp_path)) == before


@pytest.mark.parametrize("path", PATHS)
def test_a_bundle_with_such_a_path_is_not_pushed(path: str, tmp_path: Path, memory: Any) -> None:
    with pytest.raises(BundleError):
        push(write_bundle(tmp_path / "hostile.cgb", listing(path)), "memory://far/m.cgb")
    assert not memory.store


@pytest.mark.parametrize("text", [b"", b"{}", b"not JSON", b"\xff", b"[" * 100000, b'{"format":1,"format":6}', b'{"format":99}'])
def test_what_lies_there_and_is_no_manifest_is_not_replaced(text: bytes, bundle: Path, tmp_path: Path, memory: Any) -> None:
    memory.pipe_file("/far/m.cgb/manifest.json", text)
    for call in (
        lambda: push(bundle, "memory://far/m.cgb", replace=True),
        lambda: pull("memory://far/m.cgb", tmp_path / "back.cgb"),
    ):
        with pytest.raises(BundleError, match="^memory://far/m.cgb: "):
            call()
    assert list(memory.store) == ["/far/m.cgb/manifest.json"]


@pytest.mark.parametrize("link", ["host", "host/model.so", file_names.WEIGHTS, ".push", ".push/left"])
def test_a_link_in_the_target_leads_nowhere(link: str, bundle: Path, other: Path, tmp_path: Path) -> None:
    far, victim = tmp_path / "far", tmp_path / "victim"
    push(bundle, str(far))
    shutil.copytree(far / "host", victim)
    if (far / link).is_dir():
        shutil.rmtree(far / link)
    (far / link).unlink(missing_ok=True)
    (far / link).parent.mkdir(exist_ok=True)
    (far / link).symlink_to(victim)
    with raises("file-damaged", match="a symbolic link"):
        push(other, str(far), replace=True)
    assert manifest_text.list_files(str(victim)) == ["model.so"]


def test_equal_files_with_like_names_both_arrive(tmp_path: Path) -> None:
    """Before a fix, the temporary paths of `a/b` and `a-b` were the same."""

    def change(manifest: Manifest) -> Manifest:
        for name in ("a/b", "a-b"):
            (tmp_path / "tiny.cgb" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "tiny.cgb" / name).write_bytes(b"equal")
        return manifest

    bundle = write_bundle(tmp_path / "tiny.cgb", change)
    push(bundle, str(tmp_path / "far"))
    pull(str(tmp_path / "far"), tmp_path / "back.cgb")
    assert same(bundle, tmp_path / "back.cgb")


# --- bytes ------------------------------------------------------------------------------------------------------------


class Endless(io.RawIOBase):
    """A file whose reads never end. `bytes_read` counts the bytes that were read."""

    bytes_read = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def read(self, size: int = -1) -> bytes:
        assert 0 <= size < 1 << 30, "all of it"
        Endless.bytes_read += size
        return bytes(size)


@pytest.mark.parametrize("name", [file_names.WEIGHTS, file_names.SELF_TEST, file_names.MANIFEST, file_names.SIGNATURE])
def test_no_more_is_read_than_is_declared(
    name: str, bundle: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bundle / file_names.SIGNATURE).write_bytes(bytes(96))
    push(bundle, "memory://far/m.cgb")
    real = type(memory).open

    def opened(self: Any, path: str, *arguments: Any, **named: Any) -> Any:
        return Endless() if path.endswith(name) else real(self, path, *arguments, **named)

    monkeypatch.setattr(type(memory), "open", opened)
    monkeypatch.setattr(limits, "JSON_BYTES", 1 << 20)
    Endless.bytes_read = 0
    with raises("file-damaged", match=f"{name}: "):
        pull("memory://far/m.cgb", tmp_path / "back.cgb")
    most = {file_names.MANIFEST: limits.JSON_BYTES, file_names.SIGNATURE: file_names.SIGNATURE_BYTES}
    assert Endless.bytes_read <= 1 + most.get(name, (bundle / name).stat().st_size)
    assert not (tmp_path / "back.cgb").exists()


# --- leftovers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def left(bundle: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of a pull that was interrupted at its last file, the smallest."""
    manifest = push(bundle, "memory://far/m.cgb").manifest
    last = min(manifest.files, key=lambda file: file.bytes)
    real = type(memory).open

    def broken(self: Any, path: str, *arguments: Any, **named: Any) -> Any:
        if path.endswith(last.path):
            raise ConnectionError("the network is gone")
        return real(self, path, *arguments, **named)

    monkeypatch.setattr("cgcompile.tools.transfer.AT_ONCE", 1)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "open", broken)
        with raises("remote-failed", match="the network is gone"):
            pull("memory://far/m.cgb", tmp_path / "back.cgb")
    [leftover] = tmp_path.glob(".back.cgb.*.pull")
    assert len(list(leftover.iterdir())) >= 3
    return leftover


def pulled(bundle: Path, tmp_path: Path) -> bool:
    pull("memory://far/m.cgb", tmp_path / "back.cgb")
    return same(bundle, tmp_path / "back.cgb") and not list(tmp_path.glob(".back.cgb.*"))


def test_leftovers_belong_to_this_user_alone(left: Path, bundle: Path, tmp_path: Path) -> None:
    assert left.stat().st_mode & 0o777 == 0o700
    assert pulled(bundle, tmp_path)


@pytest.mark.parametrize(
    "spoil", [lambda data: bytes(len(data)), lambda data: data[:-1], lambda data: data + b"!", lambda data: b""]
)
def test_spoiled_leftovers_travel_again(spoil: Callable[[bytes], bytes], left: Path, bundle: Path, tmp_path: Path) -> None:
    for file in left.iterdir():
        file.write_bytes(spoil(file.read_bytes()))
    assert pulled(bundle, tmp_path)


def test_the_folder_of_leftovers_is_no_link(left: Path, tmp_path: Path) -> None:
    shutil.rmtree(left)
    victim = tmp_path / "victim"
    victim.mkdir()
    left.symlink_to(victim)
    with raises("output-unwritable", match="it is a link or a file, or other users have access to it"):
        pull("memory://far/m.cgb", tmp_path / "back.cgb")
    assert not list(victim.iterdir())


def test_nobody_elses_leftovers_are_taken(left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    with raises("output-unwritable", match="it is a link or a file, or other users have access to it"):
        pull("memory://far/m.cgb", tmp_path / "back.cgb")


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_leftovers_that_others_could_reach_are_not_taken(left: Path, tmp_path: Path, mode: int) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    for file in list(left.iterdir()):
        file.unlink()
        file.symlink_to(victim)
    left.chmod(mode)
    with raises("output-unwritable", match="it is a link or a file, or other users have access to it"):
        pull("memory://far/m.cgb", tmp_path / "back.cgb")
    assert victim.read_bytes() == b"mine" and not (tmp_path / "back.cgb").exists()


def test_what_is_published_is_hashed_where_it_lies(
    bundle: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(bundle, "memory://far/m.cgb")

    def spoiling(file: Path, place: Path) -> None:
        place.write_bytes(bytes(file.stat().st_size))

    monkeypatch.setattr("cgcompile.tools.transfer.link", spoiling)
    with raises("file-damaged", match="SHA-256"):
        pull("memory://far/m.cgb", tmp_path / "back.cgb")
    assert not (tmp_path / "back.cgb").exists()


# --- a server of HTTP -------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Serves files of `folder` according to `manner`: completely, in parts, truncated, or endlessly."""

    folder, manner, asked = Path(), "parts", [""]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path, ranged = self.folder / self.path.lstrip("/"), self.headers.get("Range", "")
        if not path.is_file():
            self.send_error(404)
            return
        data, manner = path.read_bytes(), self.manner if path.name == file_names.WEIGHTS else "parts"
        begin = int(ranged.removeprefix("bytes=").partition("-")[0]) if ranged and manner != "whole" else 0
        self.asked.append(ranged)
        self.send_response(206 if begin else 200)
        if manner == "endless":
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if not body:
            return
        try:
            self.wfile.write(data[begin:] if manner != "cut" else data[begin : begin + 10])
            for _ in range(1000 if manner == "endless" else 0):
                self.wfile.write(bytes(1 << 20))
        except OSError:
            pass
        self.close_connection = manner in ("cut", "endless")


@pytest.fixture
def served(bundle: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    Handler.folder, Handler.manner, Handler.asked = bundle, "parts", []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("manner", ["parts", "whole"])
def test_a_pull_from_a_server_goes_on_within_a_file(manner: str, served: str, bundle: Path, tmp_path: Path) -> None:
    Handler.manner = "cut"
    with raises("remote-failed", match=r"weights\.safetensors"):
        pull(served, tmp_path / "back.cgb")
    weights = (bundle / file_names.WEIGHTS).read_bytes()
    [left] = tmp_path.glob(f".back.cgb.*.pull/{hashlib.sha256(weights).hexdigest()}")
    left.write_bytes(weights[:100])
    Handler.manner = manner
    pull(served, tmp_path / "back.cgb")
    assert same(bundle, tmp_path / "back.cgb") and "bytes=100-" in Handler.asked


def test_a_server_that_does_not_end_is_left(served: str, tmp_path: Path) -> None:
    Handler.manner = "endless"
    with raises("file-damaged", match=r"weights\.safetensors"):
        pull(served, tmp_path / "back.cgb")
    assert sum(path.stat().st_size for path in tmp_path.glob(".back.cgb.*.pull/*")) < 1 << 20
