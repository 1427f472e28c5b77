"""The `onnx-kv` command. Each command is one file here, imported only when it is called or listed."""

from __future__ import annotations

import errno
import importlib
import pkgutil

import click

import onnx_kv
from onnx_kv.errors import OnnxKvError


class _Refusal(click.ClickException):
    """Any deliberate error: its message on stderr, exit code 2 as for a usage error."""

    exit_code = 2


class _CommandFolder(click.Group):
    """A group whose commands are the modules here: `cli/patch.py` defines `command`, run as `onnx-kv patch`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except OnnxKvError as error:
            raise _Refusal(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe went away, which click handles
                raise
            raise _Refusal(str(error)) from error


@click.group(cls=_CommandFolder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(onnx_kv.__version__, prog_name="onnx-kv")
def main() -> None:
    """Choose how an exported LLM's KV cache lies in memory, prove nothing else changed, and run it."""
