"""`cgcompile sign`: signs a bundle's manifest, so that anyone with the public key can verify who built the bundle."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ..options import BundlePath
from ..output import record, show, write_json


def sign(
    bundle: BundlePath,
    key: Annotated[
        str,
        typer.Option(
            "--key", metavar="FILE", help="The private ed25519 key: PEM, as openssl genpkey makes it.", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Sign a bundle with an ed25519 key.

    Checks every file and invariant, then writes manifest.json.sig into the
    bundle. The manifest holds the hash of every other file, so the
    signature covers all of them. It proves who built the bundle, and says
    nothing about what the bundle does.

    \b
    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem
    cgcompile sign model.cgb --key private.pem
    """
    import cgcompile

    from ..summary import bulk

    signature = cgcompile.sign(bundle, key)
    public = signature.key.hex()
    if as_json:
        write_json({"path": bundle, "key": public, "replaced": signature.replaced})
        return
    before = ", in the place of an earlier signature" if signature.replaced else ""
    show(record([
        ("signed", f"{bundle}: {bulk(signature.manifest)}{before}"),
        ("key", public),
        ("verify", shlex.join(["cgcompile", "verify", bundle, "--key", public])),
        ("load", f"cgbundle.load({bundle!r}, key={public!r})"),
    ]))  # fmt: skip
