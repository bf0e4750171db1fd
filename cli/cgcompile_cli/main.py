"""Registers the commands.  They import torch, cgbundle and Rich when they run, so that `--help` is fast."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import errors, signals
from .commands import bench, build, check, diff, doctor, explain, inspect, operators, run, serve, sign, sizes, storage, verify


class Command(TyperCommand):
    """A command that shows a required argument as MODEL, where Typer shows {MODEL}.  It refuses two values for an option that takes
    one, where Typer uses the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # True during shell completion
            parser: Any = self.make_parser(ctx)
            _, _, params = parser.parse_args(args=list(args))
            for param in params:
                takes_one = param.param_type_name == "option" and not (param.multiple or param.is_flag or param.count)
                if takes_one and (number := params.count(param)) > 1:
                    raise errors.UsageError(f"{param.opts[0]} takes one value, got {number}", f"{ctx.command_path} --help")
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class Commands(TyperGroup):
    """The group of all commands; errors.py handles every exception of a command."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override, unused-ignore]
        with errors.as_text(ctx.obj):
            return super().invoke(ctx)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override, unused-ignore]
        ctx.obj = list(args)  # hints repeat the user's command
        with errors.as_text(ctx.obj):
            return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Commands, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        import cgcompile
        from cgbundle.format import schema

        typer.echo(f"cgcompile {cgcompile.__version__} (bundle format {schema.VERSION})")
        raise typer.Exit()


@app.callback()
def cgcompile(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Ahead-of-time CUDA graphs for PyTorch: build a bundle once, and load
    it without torch in a fraction of a second.

    Data goes to stdout, progress and messages to stderr. Exit status: 0
    ok; 1 the model or bundle has findings or fails verification; 2 wrong
    usage or environment; 130, 143, 129 after Ctrl-C, SIGTERM, SIGHUP. With
    --json an error is also an object on stdout: {"error": {"code",
    "message", "where", "fix"}}. Colours only on a terminal, and none where
    NO_COLOR is set.
    """


app.command("build", cls=Command)(build.build)
app.command("check", cls=Command)(check.check)
app.command("inspect", cls=Command)(inspect.inspect)
app.command("verify", cls=Command)(verify.verify)
app.command("sign", cls=Command)(sign.sign)
app.command("run", cls=Command)(run.run)
app.command("serve", cls=Command)(serve.serve)
app.command("bench", cls=Command)(bench.bench)
app.command("diff", cls=Command)(diff.diff)
app.command("sizes", cls=Command)(sizes.sizes)
app.command("explain", cls=Command)(explain.explain)
app.command("targets", cls=Command)(doctor.targets)
app.command("operators", cls=Command)(operators.operators)
app.command("doctor", cls=Command)(doctor.doctor)
caches = typer.Typer(help="Show or remove the cache of builds.", no_args_is_help=True)
caches.command("dir", cls=Command)(storage.dir)
caches.command("clean", cls=Command)(storage.clean)
app.add_typer(caches, name="cache")
app.command("push", cls=Command)(storage.push)
app.command("pull", cls=Command)(storage.pull)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # do not fail for characters that the terminal's encoding lacks
    signals.install()
    try:
        app(prog_name="cgcompile")
    finally:
        if sys.stdout is not sys.__stdout__:  # model code has run; its output at exit must not go to stdout
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            sys.stdout = sys.stderr
        gc.freeze()  # skip the garbage collection at exit, which takes 1.6 s after a build
