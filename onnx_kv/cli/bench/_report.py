"""How every benchmark reports: a table with notes, and a result file that `tools/compare_bench.py` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from onnx_kv.bench.result import Result, Row, command_line, environment
from onnx_kv.cli._console import output
from onnx_kv.cli._paths import OutputFile
from onnx_kv.cuda import device_info, device_ordinal
from onnx_kv.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


def json_option(function: Function) -> Function:
    """Add `--json FILE`, the result file."""
    option = click.option("--json", "json_path", type=OutputFile(), help="Write the result here, for compare_bench.py.")
    return option(function)


def report(title: str, rows: Sequence[Row], device: str, json_path: Path | None) -> None:
    """Print rows as a table with their notes, and write the result file."""
    table = Table("configuration", "median", "10–90 %", "samples", title=title)
    for row in rows:
        table.add_row(row.name, f"{row.median:.5g} {row.unit}", f"{row.low:.4g} – {row.high:.4g}", str(row.samples))
    console = output()
    console.print(table)
    for row in rows:
        for note in row.notes:
            console.print(f"{row.name}: {note}", highlight=False)
    write_result(json_path, rows, device_facts(device))


def write_result(json_path: Path | None, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Write a result file, where one is wanted.

    Raises:
        ConfigError: it cannot be written.
    """
    if json_path is None:
        return
    try:
        json_path.write_text(Result(command_line(), environment(facts), tuple(rows)).to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{json_path} cannot be written: {error.strerror}") from error


def device_facts(device: str) -> dict[str, str]:
    """What a result says of the device."""
    ordinal = device_ordinal(device)
    if ordinal is None:
        return {"device": device}
    info = device_info(ordinal)
    return {"device": info.name, "driver": str(info.driver_version)}
