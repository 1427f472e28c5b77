"""Turns a recipe into a checkpoint folder, as a model hub would have it. Needs the `[export]` extra."""

from __future__ import annotations

import math
from pathlib import Path

import click
import torch
import transformers
from model_recipes import VOCABULARY, Recipe
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = Path(__file__).resolve().parent.parent / "models" / "corpus.txt"
END_OF_TEXT = "<|endoftext|>"
SEED = 20240607

TRAINING_STEPS = 320
LEARNING_RATE = 4e-3
BATCH = 4
WINDOW = 384


def write_checkpoint(recipe: Recipe, folder: Path) -> None:
    """Writes configuration, safetensors and tokenizer into `folder`, which is made if need be."""
    tokenizer = train_tokenizer()
    end = tokenizer.eos_token_id
    config_class = getattr(transformers, f"{recipe.architecture}Config")
    config = config_class(**recipe.sizes, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    dtype = torch.float16 if recipe.precision == "fp16" else torch.float32
    # One thread: faster for matrices this small, and the sums have one order on every machine.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if recipe.trained:
        loss = train_on_corpus(model, tokenizer)
        click.echo(f"trained to {loss:.3f} nats a token", err=True)
    else:
        draw_weights(model, end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Trains a byte-level BPE of VOCABULARY entries on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(CORPUS)], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


@torch.no_grad()
def draw_weights(model: torch.nn.Module, end: int) -> None:
    """Draws every parameter from SEED, scaled so that the logits spread as a real model's do.

    Matrices have unit gain (standard deviation 1 / sqrt(inputs)), so activations keep their size through the layers;
    the head has three times that, so the logits' standard deviation is about 3. The end token's row of the head is
    zero: a random model would otherwise stop at a random place.
    """
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.add_(0.1 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:
            gain = 3.0 if name.startswith("lm_head") else 1.0
            parameter.copy_(gain / math.sqrt(parameter.shape[1]) * noise)
        if name.startswith("lm_head"):
            parameter[end] = 0.0


def train_on_corpus(model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast) -> float:
    """Trains `model` on windows of the corpus: half of them start a paragraph, as prompts do, half start anywhere.

    The number of steps is chosen so that the model knows the text without being certain of every word.

    Returns:
        The mean cross-entropy of the last ten steps, in nats a token.
    """
    tokens, paragraphs = read_corpus(tokenizer)
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=TRAINING_STEPS)
    losses = []
    model.train()
    for _ in track(range(TRAINING_STEPS), description="training", console=Console(stderr=True)):
        anywhere = torch.randint(len(tokens), (BATCH // 2,), generator=generator)
        prompts = paragraphs[torch.randint(len(paragraphs), (BATCH // 2,), generator=generator)]
        starts = torch.cat([anywhere, prompts])[:, None]
        windows = tokens[(starts + torch.arange(WINDOW)) % len(tokens)]
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def read_corpus(tokenizer: transformers.PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """The corpus as tokens, an end token after each page, and the positions at which paragraphs start."""
    tokens: list[int] = []
    paragraphs: list[int] = []
    for page in CORPUS.read_text(encoding="utf-8").split("\n\n\n"):
        encoded = tokenizer(page, return_offsets_mapping=True)
        for token, (begin, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if page[:begin].endswith("\n\n") or begin == 0:
                paragraphs.append(len(tokens))
            tokens.append(token)
        tokens.append(tokenizer.eos_token_id)
    return torch.tensor(tokens), torch.tensor(paragraphs)
