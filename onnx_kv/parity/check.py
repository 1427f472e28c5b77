"""`check_parity`: which configurations to run, from which directories, and what each has to agree in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onnx_kv.errors import CapacityError, ConfigError, ParityError
from onnx_kv.layout import KvLayout
from onnx_kv.parity.compare import compare_prompt
from onnx_kv.parity.configuration import Configuration, Job, Recording, record
from onnx_kv.parity.copies import patched_copy
from onnx_kv.parity.prompts import random_prompts
from onnx_kv.parity.report import ParityReport, Verdict
from onnx_kv.passes import StampKvLayout
from onnx_kv.runtime.model import RuntimeModel

LAYOUTS = ("head-major", "seq-major")
PROMPT_LENGTHS = (1, 17, 300)
TOKENS = 64


def check_parity(
    model_dir: str | Path,
    other: str | Path | None = None,
    *,
    layouts: Sequence[KvLayout | str] = LAYOUTS,
    against_stock: bool = False,
    tokens: int = TOKENS,
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    on_run: Callable[[str], object] | None = None,
    **settings: Any,
) -> ParityReport:
    """Run the same prompts in several configurations, each in a process of its own, and compare what they did.

    With one directory the configurations are its layouts, each from a temporary patched copy unless the directory has
    that layout from a patch already; with two, the directories as they are. Prompts are random tokens.

    Args:
        model_dir: a model directory; its run is the reference.
        other: a second one.
        layouts: layouts of `model_dir` to compare; not used with two directories.
        against_stock: also run `model_dir`, head-major, with stock ONNX Runtime's kernels.
        tokens: tokens to generate after each prompt; a stop token ends nothing.
        prompt_lengths: tokens of each prompt.
        on_run: told the name of each configuration before it runs.
        **settings: of the decoders, as in `onnx_kv.runtime.config`.

    Raises:
        ParityError: a configuration cannot run, or two runs were no different ones.
        CapacityError: a prompt and its tokens are longer than the model's sequences.
        ConfigError: a setting or length that cannot be used.
        ModelDirError, MetadataError, PatchRefusedError: a directory cannot be read or patched.
    """
    model = RuntimeModel.open(model_dir)
    prompts = _prompts(model, tokens, prompt_lengths)
    with tempfile.TemporaryDirectory(prefix="onnx-kv-parity-") as name:
        folder, source = Path(name), model.directory.path
        if other is None:
            wanted = [x if isinstance(x, KvLayout) else KvLayout.parse(x) for x in layouts]
            planned = [
                Configuration(x.cli_name, str(patched_copy(source, folder, x)), settings=settings) for x in wanted
            ]
        else:
            planned = [Configuration(str(path), str(path), settings=settings) for path in (model_dir, other)]
        if against_stock:
            directory = str(_stock_directory(model, folder, settings))
            planned.append(Configuration("stock", directory, stock=True, settings=settings))
        if len(planned) < 2:
            raise ConfigError("one configuration compares with nothing; give two layouts, a second directory or stock")
        recordings = []
        for index, configuration in enumerate(planned):
            if on_run is not None:
                on_run(configuration.name)
            job = Job(configuration, [[prompt] for prompt in prompts], tokens)
            recordings.append(record(job, folder / f"run-{index}"))
        _refuse_equal_runs(planned, recordings)
        return ParityReport(_verdicts(planned, recordings, prompts), tokens)


def _stock_directory(model: RuntimeModel, folder: Path, settings: dict[str, Any]) -> Path:
    """A directory that stock ONNX Runtime runs.

    An exported one stands as it is, so that nothing of ours is in the way. On CUDA a sliding-window cache has to be as
    small as its window, which a patched copy need not be.
    """
    if model.layout is KvLayout.HEAD_MAJOR and settings.get("device", "cpu") == "cpu":
        return model.directory.path
    return patched_copy(model.directory.path, folder, KvLayout.HEAD_MAJOR)


def _prompts(model: RuntimeModel, tokens: int, lengths: Sequence[int]) -> list[list[int]]:
    prompts = random_prompts(model, lengths)
    if tokens < 1:
        raise ConfigError(f"tokens={tokens}: must be at least 1")
    most = model.metadata.max_sequence_length
    if max(lengths) + tokens > most:
        raise CapacityError(
            f"a prompt of {max(lengths)} tokens and {tokens} to generate need {max(lengths) + tokens}, and "
            f"{model.directory.path} has room for {most}"
        )
    return prompts


def _refuse_equal_runs(planned: Sequence[Configuration], recordings: Sequence[Recording]) -> None:
    """Two runs that differ in nothing prove nothing, however equal their output."""
    seen: dict[tuple[object, ...], str] = {}
    for configuration, recording in zip(planned, recordings, strict=True):
        key = (recording.layout, frozenset(_arithmetic(recording)), configuration.stock)
        if key in seen:
            raise ParityError(
                f"nothing was compared: {seen[key]} and {configuration.name} both ran with layout {recording.layout}"
            )
        seen[key] = configuration.name


def _verdicts(
    planned: Sequence[Configuration], recordings: Sequence[Recording], prompts: Sequence[Sequence[int]]
) -> list[Verdict]:
    reference = recordings[0]
    verdicts = []
    for index, (configuration, recording) in enumerate(zip(planned, recordings, strict=True)):
        # A configuration that failed has fewer runs; those before the failure are compared all the same.
        pairs = zip(prompts, reference.runs, recording.runs, strict=False) if index > 0 else ()
        compared = [compare_prompt(len(prompt), *runs) for prompt, *runs in pairs]
        verdicts.append(
            Verdict(
                configuration=configuration,
                recording=recording,
                reference=planned[0].name if index > 0 else None,
                exact=not configuration.stock and _arithmetic(recording) == _arithmetic(reference),
                prompts=tuple(compared),
                failure=recording.failure,
            )
        )
    return verdicts


def _arithmetic(recording: Recording) -> set[str]:
    """The passes that change what is computed; a layout changes only where it is kept."""
    return set(recording.passes) - {StampKvLayout.name}
