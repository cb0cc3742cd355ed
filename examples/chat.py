"""A chat whose long system prompt is computed by one process and loaded by another.

    python examples/chat.py /mnt/kv                     # a mount of kvfs; any directory will do
    python examples/chat.py /mnt/kv --device cuda --dtype bfloat16 --preset 8b --shared 32768

The model is a Llama with seeded random weights, its tokenizer is UTF-8: nothing is downloaded, and
what it says makes no sense. All else is as with a real one. A first process answers every prompt
without a cache and saves what it has computed; a second one answers the same prompts, and loads.
Printed and plotted is the time to the first token of both. Exits with 1 if what they say differs.

What "the same" means: a sum of floats depends on its order, and that on how many tokens a forward
pass has. So a prompt is always computed in the same pieces, which end at the last whole block
of each message; the cache only replaces pieces. Then logits are equal bit by bit. A prompt that is
computed in one go has logits that differ in their last bits, cache or no cache: that is shown, too.
For the same reason only prompts are saved; a reply's tokens came one at a time, and are computed
with the next prompt.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvfs.client import PrefixCache, Spec
from kvfs.connectors.transformers import load, save, spec_of

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "mlp": 128, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 320},
    "small": {"hidden": 512, "mlp": 4096, "layers": 4, "heads": 8, "kv_heads": 2, "vocab": 320},
    # As Llama 3.2 1B and Llama 3.1 8B are.
    "1b": {"hidden": 2048, "mlp": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "8b": {"hidden": 4096, "mlp": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128256},
}
SYSTEM, USER, ASSISTANT, END = range(256, 260)  # the tokens that are no bytes
QUESTIONS = ("Who are you?", "And what do you do with a cache?", "Thank you. Was that all?")
ANOTHER = "Somebody else asks something else, of the same assistant."


class Prompt(NamedTuple):
    """What is asked. ends: where its messages end, in tokens; the last one is its length."""

    name: str
    tokens: list[int]
    ends: tuple[int, ...]


class Answer(NamedTuple):
    """What one process has found. seconds: to the first token."""

    tokens: int
    cached: int
    seconds: float
    logits: torch.Tensor
    reply: list[int]
    seconds_in_one_go: float = 0.0
    difference_in_one_go: float = 0.0


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="a mount of kvfs, or any directory")
    parser.add_argument("--shared", type=int, default=4096, help="tokens of the system prompt")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block")
    parser.add_argument("--new", type=int, default=16, help="tokens of a reply")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    for name in PRESETS["small"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the preset's")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=1, help="times are medians of so many")
    parser.add_argument("--plot", type=Path, default=Path("chat.png"), help="what to draw")
    options = parser.parse_args()
    if not options.directory.is_dir():
        parser.error(f"{options.directory}: expected a directory that is there")
    return options


def shape(options: argparse.Namespace) -> dict[str, int]:
    """Return the model's, by the names of the options."""
    preset = PRESETS[options.preset]
    given = {name: getattr(options, name) for name in preset}
    return preset | {name: value for name, value in given.items() if value is not None}


def build(options: argparse.Namespace) -> Any:  # noqa: ANN401 (transformers' own types say less)
    """Return the model: the same numbers in every process."""
    of = shape(options)
    config = LlamaConfig(
        hidden_size=of["hidden"],
        intermediate_size=of["mlp"],
        num_hidden_layers=of["layers"],
        num_attention_heads=of["heads"],
        num_key_value_heads=of["kv_heads"],
        vocab_size=of["vocab"],
        max_position_embeddings=1 << 17,
        initializer_range=of["hidden"] ** -0.5,  # so that attention matters
    )
    torch.manual_seed(options.seed)
    from_config: Any = AutoModelForCausalLM.from_config
    with torch.device(options.device):
        model = from_config(config, dtype=getattr(torch, options.dtype))
    return model.eval()


def spec_for(model: Any, options: argparse.Namespace) -> Spec:  # noqa: ANN401 (see build)
    """Return what a block is. Bits depend on threads and release, so these are part of it here."""
    return spec_of(
        model,
        name=f"examples/chat {shape(options)}",
        revision=f"seed {options.seed}, torch {torch.__version__}, {options.threads} threads",
        tokenizer="utf-8",
        block_tokens=options.block,
    )


def message(role: int, text: str) -> list[int]:
    """Return its tokens."""
    return [role, *text.encode(), END]


def system_prompt(tokens: int) -> list[int]:
    """One whose last whole block ends after `tokens`, if that is a multiple of a block."""
    rules = "".join(f"Rule {number}: be kind, brief and right. " for number in range(tokens))
    return message(SYSTEM, rules[: tokens - 1])


def pieces(prompt: Prompt, block: int, start: int = 0) -> list[tuple[int, int]]:
    """The forward passes that compute a prompt from token `start` on: first and last token."""
    whole = {(end - 1) // block * block for end in prompt.ends}
    ends = [*sorted(end for end in whole if end > start), len(prompt.tokens)]
    return list(zip([start, *ends[:-1]], ends, strict=True))


@torch.inference_mode()
def compute(
    model: Any,  # noqa: ANN401 (see build)
    cache: DynamicCache,
    tokens: Sequence[int],
    parts: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """Return the logits after the last token."""
    for start, end in parts:
        ids = torch.tensor([tokens[start:end]], device=model.device)
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = out.logits[0, -1].cpu()
    return logits


def timed(rounds: int, answer: Callable[[], tuple[Any, int, torch.Tensor]]) -> tuple[Any, ...]:
    """Return the median of seconds, and what the last round has found."""
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        found = answer()
        found[-1][:SYSTEM].argmax().item()  # the first token
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), *found


class Process:
    """One of the two."""

    def __init__(self, options: argparse.Namespace, model: Any, prefixes: PrefixCache) -> None:  # noqa: ANN401 (see build)
        self.options, self.model, self.prefixes = options, model, prefixes

    def chat(self) -> dict[str, Answer]:
        """Go through the conversation, and then answer somebody else."""
        system = system_prompt(self.options.shared)
        history, answers = system, {}
        ends: tuple[int, ...] = (len(system),)
        for turn, question in enumerate(QUESTIONS, 1):
            tokens = [*history, *message(USER, question), ASSISTANT]
            ends = (*ends, len(tokens))
            prompt = Prompt(f"turn {turn}", tokens, ends)
            answer = self.answer(prompt, keep=True)
            answers[prompt.name] = answer
            history = [*tokens, *answer.reply, END]
        tokens = [*system, *message(USER, ANOTHER), ASSISTANT]
        prompt = Prompt("somebody else", tokens, (len(system), len(tokens)))
        answers[prompt.name] = self.answer(prompt, keep=False)
        return answers

    def answer(self, prompt: Prompt, *, keep: bool) -> Answer:
        raise NotImplementedError

    def reply(self, cache: DynamicCache, logits: torch.Tensor) -> list[int]:
        """The most probable bytes: what is no text is left out."""
        said = []
        for _ in range(self.options.new):
            said.append(int(logits[:SYSTEM].argmax()))
            logits = compute(self.model, cache, said, [(len(said) - 1, len(said))])
        return said


class First(Process):
    """Computes, in pieces and in one go; saves what it will be asked to go on from."""

    def answer(self, prompt: Prompt, *, keep: bool) -> Answer:
        model, tokens, rounds = self.model, prompt.tokens, self.options.rounds
        parts = pieces(prompt, self.options.block)

        def anew(parts: Sequence[tuple[int, int]]) -> tuple[DynamicCache, int, torch.Tensor]:
            cache = DynamicCache(config=model.config)
            return cache, 0, compute(model, cache, tokens, parts)

        whole, _, _, one_go = timed(rounds, lambda: anew([(0, len(tokens))]))
        seconds, cache, _, logits = timed(rounds, lambda: anew(parts))
        if keep:
            save(self.prefixes, cache, tokens[: parts[-1][0]])
        difference = float((one_go - logits).abs().max())
        reply = self.reply(cache, logits)
        return Answer(len(tokens), 0, seconds, logits, reply, whole, difference)


class Second(Process):
    """Loads, and computes the rest."""

    def answer(self, prompt: Prompt, *, keep: bool) -> Answer:  # noqa: ARG002 (it is there already)
        model, tokens = self.model, prompt.tokens

        def cached() -> tuple[DynamicCache, int, torch.Tensor]:
            cache, done = load(self.prefixes, model, tokens)
            parts = pieces(prompt, self.options.block, done)
            return cache, done, compute(model, cache, tokens, parts)

        seconds, cache, done, logits = timed(self.options.rounds, cached)
        return Answer(len(tokens), done, seconds, logits, self.reply(cache, logits))


PARTS: dict[str, type[Process]] = {"first": First, "second": Second}


def is_namespace(path: Path) -> bool:
    """Whether it is one of kvfs that keeps prefixes together."""
    try:
        return os.getxattr(path, "user.kvfs.prefix") == b"on"
    except OSError:
        return False


def run_part(options: argparse.Namespace, part: str, results: Path) -> None:
    """Be one of the two processes."""
    torch.set_num_threads(options.threads)
    model = build(options)
    spec = spec_for(model, options)
    path = options.directory / f"chat-{spec.root.hex()[:8]}"
    with PrefixCache(path, spec, create=True) as prefixes:
        if part == "first":
            kind = "a namespace of kvfs" if is_namespace(path) else "a directory, no kvfs"
            print(f"{path}: {kind}; blocks of {spec.block_tokens} tokens, {spec.block_bytes:,} B")
        # What a process does only once is not what is measured.
        compute(
            model, DynamicCache(config=model.config), system_prompt(128), [(0, 100), (100, 129)]
        )
        answers = PARTS[part](options, model, prefixes).chat()
    torch.save({name: answer._asdict() for name, answer in answers.items()}, results)


def report(first: dict[str, Answer], second: dict[str, Answer]) -> bool:
    """Print the comparison; whether both have said the same."""
    same = True
    heads = ("in one go", "in pieces", "cached", "ratio")
    print(f"{'seconds to the first token':26}" + "".join(f"{head:>11}" for head in heads))
    for name, without in first.items():
        cached = second[name]
        ratio = cached.seconds / min(without.seconds, without.seconds_in_one_go)
        times = (without.seconds_in_one_go, without.seconds, cached.seconds, ratio)
        of = f"{name}, {cached.cached} of {cached.tokens}"
        print(f"{of:26}" + "".join(f"{value:11.4f}" for value in times))
    for name, without in first.items():
        cached = second[name]
        equal = torch.equal(without.logits, cached.logits)
        token = cached.reply[0]
        same = same and equal and without.reply == cached.reply
        by = float((without.logits - cached.logits).abs().max())
        print(
            f"{name}: first token {token} "
            f"{'is' if token == without.reply[0] else 'IS NOT'} the one recomputed, "
            f"logits {'equal bit by bit' if equal else f'DIFFER by {by:.2g}'}, "
            f"reply {'the same' if without.reply == cached.reply else 'DIFFERENT'}; "
            f"in one go logits differ by {without.difference_in_one_go:.2g}"
        )
    return same


def plot(path: Path, first: dict[str, Answer], second: dict[str, Answer]) -> None:
    """Bars for each prompt, seconds on a logarithmic axis."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (optional)
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(title="seconds to the first token")
    series = {
        "in one go": [answer.seconds_in_one_go for answer in first.values()],
        "in pieces": [answer.seconds for answer in first.values()],
        "from the cache": [answer.seconds for answer in second.values()],
    }
    for place, (name, values) in enumerate(series.items()):
        bars = axes.bar([at + 0.27 * place for at in range(len(values))], values, 0.27, label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_yscale("log")
    axes.set_xticks([at + 0.27 for at in range(len(first))], list(first))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)
    print(f"plotted: {path}")


def main() -> None:
    """Run both processes, one after the other, and compare."""
    options = arguments()
    fork = multiprocessing.get_context("fork")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            results = Path(folder, part)
            # A fork of this process, which has imported much and computed nothing.
            process = fork.Process(target=run_part, args=(options, part, results))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)  # it has said why
            found[part] = {name: Answer(**of) for name, of in torch.load(results).items()}
    same = report(**found)
    plot(options.plot, **found)
    if not same:
        sys.exit("the answers from the cache are not those without it")


if __name__ == "__main__":
    main()
