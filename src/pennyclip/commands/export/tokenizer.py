"""CLIP's tokenizer as other tools read it: vocab.json and merges.txt, from our own merges."""

import gzip
import json
from importlib.resources import files
from pathlib import Path

from pennyclip.data.text import ClipTokenizer

# The printable letters that stand for the 256 bytes, in the vocabulary's order (GPT-2's encoder).
LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]
# The names that OpenAI's own files give to the two special tokens, and transformers with them.
START, END = "<|startoftext|>", "<|endoftext|>"


def write_clip_tokenizer(folder: Path) -> None:
    """Write vocab.json (token to id) and merges.txt (pairs of tokens by rank)."""
    packed = files("pennyclip.data").joinpath("bpe", "clip_merges.txt.gz").read_bytes()
    merges = gzip.decompress(packed).decode("utf-8")
    joined = [line.replace(" ", "") for line in merges.splitlines()]
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *joined]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    vocabulary |= {START: ClipTokenizer.START, END: ClipTokenizer.END}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), "utf-8")
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", "utf-8")
