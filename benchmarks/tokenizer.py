"""How fast is ClipTokenizer beside open_clip's tokenizer, with the same ids?

    python benchmarks/tokenizer.py [FILE.jsonl] [--rounds 15] [--out benchmarks/results/NAME.txt]

Both take turns over the same captions in one process; each round gives one ratio of CPU time.
"cold": new tokenizers, empty caches. "warm": the captions again, as in a long list of captions,
where nearly every word has been seen before.

Ids are compared on every caption, and on random texts from all of Unicode.

Mark: at least 8 times open_clip, no id different.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ftfy
import open_clip
from open_clip.tokenizer import SimpleTokenizer

from machine import processor, publish
from pennyclip.data.text import ClipTokenizer

CAPTIONS = Path(__file__).parents[2] / "shared" / "data" / "openstax-pairs" / "captions.jsonl"

Encode = Callable[[str], list[int]]


def seconds(encode: Encode, captions: list[str]) -> float:
    """CPU time to encode all captions."""
    start = time.process_time()
    for caption in captions:
        encode(caption)
    return time.process_time() - start


def random_texts(count: int) -> list[str]:
    """Short texts of letters from everywhere in Unicode, with words and entities in between."""
    draw = random.Random(0)
    ranges = [(0x20, 0x7E), (0xA0, 0x17F), (0x20, 0x2FFF), (0x20, 0xD7FF), (0x1F300, 0x1FAFF)]
    pieces = [
        "a dog",
        "'s",
        "&amp;",
        "&eacute;",
        "Ã©",
        "â€™",
        "\n",
        "<end_of_text>",
        "１２",
        "don't",
    ]
    texts = []
    for _ in range(count):
        low, high = draw.choice(ranges)
        parts = [chr(draw.randint(low, high)) for _ in range(draw.randint(0, 12))]
        parts += draw.sample(pieces, draw.randint(0, 3))
        draw.shuffle(parts)
        texts.append("".join(parts))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("captions", nargs="?", type=Path, default=CAPTIONS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()
    if not options.captions.is_file():
        parser.error(f"there is no {options.captions}; name a .jsonl file with `captions` lists")
    lines = options.captions.read_text(encoding="utf-8").splitlines()
    captions = [caption for line in lines for caption in json.loads(line)["captions"]]

    ftfy.fix_text("schÃ¶n")  # compiles its patterns, for both
    times: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        ours, theirs = ClipTokenizer(), SimpleTokenizer()
        for name in times:
            pair = seconds(ours.encode, captions), seconds(theirs.encode, captions)
            times[name].append(pair)
    fuzzed = random_texts(20_000)
    different, fuzzed_different = (
        sum(ours.encode(text)[1:-1] != theirs.encode(text) for text in texts)
        for texts in (captions, fuzzed)
    )

    report = [
        f"date        {datetime.date.today().isoformat()}",
        f"machine     {processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}",
        f"captions    {len(captions)} of {options.captions.parent.name}, "
        f"{sum(not c.isascii() for c in captions)} not ASCII",
        f"peer        open_clip {open_clip.__version__} SimpleTokenizer",
        f"ids         different for {different} captions, {fuzzed_different} of {len(fuzzed):,} "
        "random texts",
        f"rounds      {options.rounds}, taking turns, CPU time",
        "",
        "        ours, captions/s   open_clip, captions/s   ratio: median (least - most)",
    ]
    for name, pairs in times.items():
        ours_s, theirs_s = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = [theirs / ours for ours, theirs in pairs]
        report.append(
            f"{name}    {len(captions) / ours_s:16,.0f}   {len(captions) / theirs_s:21,.0f}   "
            f"{statistics.median(ratios):13.1f} ({min(ratios):.1f} - {max(ratios):.1f})"
        )
    publish(report, options.out)


if __name__ == "__main__":
    main()
