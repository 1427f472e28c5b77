"""`onnx-kv metadata`."""

from __future__ import annotations

from pathlib import Path

import click

from onnx_kv.metadata import generate_metadata, write_metadata


@click.command()
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="File to write.  [MODEL_DIR/inference_metadata.yaml]"
)
@click.option("--stdout", is_flag=True, help="Print the text and write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--full", is_flag=True, help="Add the attention block: heads, KV heads, head size, windows.")
def command(model_dir: Path, output: Path | None, stdout: bool, force: bool, full: bool) -> None:
    """Describe a model's ports and KV layout in inference_metadata.yaml.

    What genai_config.json declares is checked against the graph beside it.
    """
    if stdout and output:
        raise click.UsageError("--stdout writes no file; leave out --output")
    if stdout:
        metadata = generate_metadata(model_dir, full=full)
        click.echo(metadata.to_yaml(), nl=False)
    else:
        path, metadata = write_metadata(model_dir, output, force=force, full=full)
        click.echo(
            f"wrote {path}: {len(metadata.layers)} cached layers, {metadata.max_sequence_length:,} tokens, "
            f"{metadata.kv_layout.cli_name}"
        )
    for warning in metadata.warnings:
        click.echo(f"warning: {warning}", err=True)
