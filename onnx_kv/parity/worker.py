"""The process of one configuration: takes its job as JSON on stdin, leaves tokens, logits and counters in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from onnx_kv.errors import ModelOutputError, OnnxKvError
from onnx_kv.parity.configuration import Configuration
from onnx_kv.runtime.decoder import Decoder


def run(configuration: Configuration, prompts: list[list[int]], tokens: int, folder: Path) -> None:
    """Generate `tokens` greedy tokens after each prompt, whatever they are, and write what `record` reads."""
    settings = {"max_length": max(map(len, prompts)) + tokens, **configuration.settings}
    generated: list[list[int]] = []
    failure = None
    with Decoder(configuration.directory, stock=configuration.stock, **settings) as decoder:
        try:
            for index, prompt in enumerate(prompts):
                steps = list(decoder.stream(prompt, max_new_tokens=tokens, stop_tokens=(), logits=True))
                logits = np.concatenate([step.logits for step in steps if step.logits is not None])
                if not np.isfinite(logits).all():
                    raise ModelOutputError("logits are not finite")
                np.save(folder / f"logits-{index}.npy", logits)
                generated.append([token for step in steps for token in step.tokens if token is not None])
        except ModelOutputError as error:
            failure = f"prompt of {len(prompt)} tokens: {error}"
        result = {
            "layout": decoder.model.layout.cli_name,
            "passes": decoder.model.passes,
            "precision": decoder.model.precision,
            "tokens": generated,
            "stats": decoder.stats.as_dict(),
            "failure": failure,
        }
    (folder / "result.json").write_text(json.dumps(result))


def main() -> None:
    """Run the job on stdin; a deliberate error is its message on stderr and exit code 2."""
    job = json.load(sys.stdin)
    try:
        run(Configuration(**job["configuration"]), job["prompts"], job["tokens"], Path(job["folder"]))
    except OnnxKvError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
