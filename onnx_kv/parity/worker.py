"""The process of one configuration: takes its job as JSON on stdin, leaves tokens, logits and counters in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from onnx_kv.errors import ModelOutputError, OnnxKvError
from onnx_kv.parity.configuration import Configuration, Job
from onnx_kv.runtime.decoder import Decoder


def run(job: Job, folder: Path) -> None:
    """Generate greedy tokens after each batch of prompts, whatever they are, and write what `record` reads."""
    configuration = job.configuration
    settings = {"max_length": job.longest, **configuration.settings}
    tokens: list[list[int]] = []
    failure = None
    with Decoder(configuration.directory, stock=configuration.stock, **settings) as decoder:
        try:
            for index, prompts in enumerate(job.batches):
                steps = list(decoder.stream(prompts, max_new_tokens=job.tokens, stop_tokens=(), logits=job.arrays))
                if job.arrays:
                    logits = np.stack([step.logits for step in steps if step.logits is not None], axis=1)
                    if not np.isfinite(logits).all():
                        raise ModelOutputError("the logits are not finite")
                    caches = [decoder.read_cache(row) for row in range(len(prompts))]
                    _save(folder / f"batch-{index}.npz", logits, caches)
                tokens += [said[len(prompt) :] for said, prompt in zip(decoder.tokens, prompts, strict=True)]
        except ModelOutputError as error:
            failure = f"prompts of {', '.join(str(len(prompt)) for prompt in prompts)} tokens: {error}"
        result = {
            "layout": decoder.model.layout.cli_name,
            "passes": decoder.model.passes,
            "precision": decoder.model.precision,
            "tokens": tokens,
            "stats": decoder.stats.as_dict(),
            "failure": failure,
        }
    (folder / "result.json").write_text(json.dumps(result))


def _save(file: Path, logits: np.ndarray, caches: list[list[np.ndarray]]) -> None:
    """Write a batch's logits [rows, steps, vocabulary] and each row's cache; bfloat16 as its bits."""
    arrays = {f"logits-{row}": values for row, values in enumerate(logits)}
    for row, cache in enumerate(caches):
        arrays |= {f"cache-{row}-{index}": values for index, values in enumerate(cache)}
    np.savez(file, **{k: v.view(np.uint16) if v.dtype == ml_dtypes.bfloat16 else v for k, v in arrays.items()})


def main() -> None:
    """Run the job on stdin; a deliberate error is its message on stderr and exit code 2."""
    request = json.load(sys.stdin)
    folder = Path(request.pop("folder"))
    try:
        run(Job(**request | {"configuration": Configuration(**request["configuration"])}), folder)
    except OnnxKvError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
