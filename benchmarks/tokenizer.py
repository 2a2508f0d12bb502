"""How fast is ClipTokenizer beside open_clip's tokenizer, with the same ids?

    python benchmarks/tokenizer.py [FILE.jsonl] [--rounds 15] [--out benchmarks/results/NAME.txt]

Both take turns over the same captions in one process; each round gives one ratio of CPU time.
"cold": new tokenizers, empty caches. "warm": the captions again, as in a long list of captions,
where nearly every word has been seen before.

Mark: warm at least 8 times open_clip, no id different.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ftfy
import open_clip
from open_clip.tokenizer import SimpleTokenizer

from pennyclip.data.text import ClipTokenizer

CAPTIONS = Path(__file__).parents[2] / "shared" / "data" / "openstax-pairs" / "captions.jsonl"

Encode = Callable[[str], list[int]]


def seconds(encode: Encode, captions: list[str]) -> float:
    """CPU time to encode all captions."""
    start = time.process_time()
    for caption in captions:
        encode(caption)
    return time.process_time() - start


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores"


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
    different = sum(ours.encode(c)[1:-1] != theirs.encode(c) for c in captions)

    report = [
        f"date        {datetime.date.today().isoformat()}",
        f"machine     {processor()}, Python {platform.python_version()}",
        f"captions    {len(captions)} of {options.captions.parent.name}, "
        f"{sum(not c.isascii() for c in captions)} not ASCII",
        f"peer        open_clip {open_clip.__version__} SimpleTokenizer",
        f"ids         different for {different} captions",
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
    text = "\n".join(report)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
