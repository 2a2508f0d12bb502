"""Select the example data set from Debian's Open Clip Art packages.

The rules stand in select_pictures.toml.

    python select_pictures.py --png .../openclipart/png --svg .../openclipart/svg --out FOLDER

Every PNG has an SVG at the same relative path whose RDF says what the picture shows and under
which licence. Candidates are ranked by how much their text says in words that several authors
of the library use, then taken from the top while theme, title and look still add variety.
There is no random state: ties are broken by a hash of the path. (-P, because this file shares
its name with a module of the standard library.)
"""

import argparse
import hashlib
import html
import io
import json
import re
import shutil
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops

RULES = tomllib.loads(Path(__file__).with_name("select_pictures.toml").read_text(encoding="utf-8"))
FIND = {name: re.compile("|".join(p), re.I) for name, p in RULES["patterns"].items()}
BLACK_AND_WHITE = re.compile(r"\(?\b(b ?(and|&) ?w|bw)\b\)?", re.I)


@dataclass(frozen=True)
class Entry:
    """One picture of the library and what its RDF says."""

    path: str  # relative, without suffix
    title: str
    description: str
    keywords: tuple[str, ...]
    creator: str


def key(text: str) -> str:
    """A fixed arbitrary order: 16 hex digits that depend on the text alone."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def words(text: str) -> list[str]:
    """The words of two and more letters, in lower case."""
    return re.findall(r"[a-z]{2,}", text.lower())


def theme(path: str) -> tuple[str, int]:
    """Theme of a picture, and how many pictures it may give."""
    prefixes = [p for p in RULES["caps"] if path.startswith(p)]
    name = max(prefixes, key=len, default=str(Path(path).parent))
    return name, RULES["caps"].get(name, RULES["folder_cap"])


def read_rdf(root: ET.Element) -> dict[str, list[str]]:
    """Texts of each field of the first RDF `Work` that has any; LookupError where none has."""
    for work in root.iter():
        fields: dict[str, list[str]] = defaultdict(list)
        for child in work if work.tag.endswith("}Work") else ():
            texts = [html.unescape(t).strip() for t in child.itertext()]
            resources = [v for k, v in child.attrib.items() if k.endswith("}resource")]
            fields[child.tag.rpartition("}")[2]] += [
                " ".join(t.split()) for t in texts + resources if t
            ]
        if fields:
            return fields
    raise LookupError("no RDF")


def refusal(root: ET.Element, licences: list[str]) -> str:
    """Why the picture may not be used, by its SVG; empty if it may."""
    if not licences or any("publicdomain" not in re.sub(r"\W", "", v.lower()) for v in licences):
        return "licence not stated as public domain"
    for image in root.iter("{http://www.w3.org/2000/svg}image"):
        if not image.get("{http://www.w3.org/1999/xlink}href", "data:").startswith("data:"):
            return "shows a linked file that is not there"
    return ""


def clean_title(title: str, path: str, creator: str) -> str:
    """The title in plain words; the file name's words where the title names a collection."""
    if FIND["collection"].search(title) or FIND["residue"].search(title):
        parts = re.split(r"[\W_]+", Path(path).name)
        title = " ".join(
            p for p in parts if not any(a.startswith(p.lower()) for a in words(creator))
        )
    title = re.sub(r"([a-z])([A-Z])", r"\1 \2", title.replace("_", " "))
    title = BLACK_AND_WHITE.sub("black and white", re.sub(r"(?<=\w)-(?=\w)", " ", title))
    return " ".join(FIND["title_residue"].sub("", title).split()).strip(" .,-#")


def clean_description(text: str, vocabulary: set[str]) -> str:
    """The English sentences about the picture, at most 40 words."""
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        known = [w in vocabulary for w in words(sentence)]
        english = sentence.isascii() and len(FIND["foreign"].findall(sentence)) < 2
        if english and sum(known) > 0.6 * len(known) and not FIND["sentence"].search(sentence):
            kept += sentence.split()
    return " ".join(kept[:40]).strip(" .,!")


def caption(entry: Entry, vocabulary: set[str]) -> str:
    """`Title. Description. keyword, keyword`; nothing is said twice."""
    title = entry.title[0].upper() + entry.title[1:]
    description = clean_description(entry.description, vocabulary)
    if set(words(description)) <= set(words(title)):
        description = ""
    said = f"{title} {description}".lower()
    keywords: list[str] = []
    for raw in entry.keywords:
        word = " ".join(re.split(r"[_.\s]+", raw.lower())).strip()
        repeated = word in keywords or re.search(rf"\b{re.escape(word)}s?\b", said)
        author = set(words(word)) & set(words(entry.creator))
        residue = word in RULES["words"]["keywords"] or FIND["residue"].search(word)
        if word.isascii() and not (repeated or author or residue or re.search(r"\w{17}", word)):
            keywords.append(word)
    return ". ".join(p for p in (title, description, ", ".join(keywords[:10])) if p)


def series(title: str) -> str:
    """What the titles of one series share: digits, colours, sides, plural and order don't count."""
    kept = {w.removesuffix("s") for w in words(title) if w not in RULES["words"]["variants"]}
    return " ".join(sorted(kept)) or title.lower()


def render(png: Path) -> Image.Image:
    """The picture on white, cut to what is drawn, the long side at most `long_side`."""
    drawing = Image.open(png).convert("RGBA")
    white = Image.new("RGBA", drawing.size, "white")
    image = Image.alpha_composite(white, drawing).convert("RGB")
    image = image.crop(ImageChops.difference(image, white.convert("RGB")).getbbox() or (0, 0, 1, 1))
    image.thumbnail((RULES["long_side"],) * 2, Image.Resampling.LANCZOS)
    return image


def phash(image: Image.Image) -> np.uint64:
    """64-bit DCT hash: the 8 x 8 lowest frequencies against their median."""
    pixels = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.LANCZOS), np.float64)
    cosines = np.cos(np.pi * np.arange(8)[:, None] * (2 * np.arange(32) + 1) / 64)  # [8, 32]
    low = (cosines @ pixels @ cosines.T).round(6)
    return np.packbits(low > np.median(low)).view(np.uint64)[0]


def encode(image: Image.Image) -> tuple[str, bytes]:
    """Suffix and bytes of the smaller of a 64-colour PNG and a JPEG at quality 85."""
    png, jpg = io.BytesIO(), io.BytesIO()
    image.quantize(64, dither=Image.Dither.NONE).save(png, "PNG", optimize=True)
    image.save(jpg, "JPEG", quality=85, optimize=True)
    return min((".png", png.getvalue()), (".jpg", jpg.getvalue()), key=lambda x: len(x[1]))


def read(png: Path, svg: Path, dropped: Counter[str]) -> list[Entry]:
    """The entries whose licence, subject and title allow their use; the others are counted."""
    entries = []
    for file in sorted(png.rglob("*.png")):
        path = file.relative_to(png).with_suffix("").as_posix()
        if file.is_symlink() or theme(path)[1] == 0:
            dropped["link to another picture" if file.is_symlink() else "folder left out"] += 1
            continue
        try:
            root = ET.parse(svg / f"{path}.svg").getroot()
            fields = read_rdf(root)
        except (OSError, ET.ParseError, LookupError):
            dropped["SVG missing or unreadable"] += 1
            continue
        creator, title, description = (
            " ".join(fields[k]) for k in ("creator", "title", "description")
        )
        title = clean_title(title, path, creator)
        if reason := refusal(root, fields["license"]):
            dropped[reason] += 1
        elif len(title) < 3 or not title.isascii() or set(words(title)) <= set(words(creator)):
            dropped["no meaningful title"] += 1
        elif FIND["unwanted"].search(" ".join([path, title, description, *fields["subject"]])):
            dropped["trademark, character, portrait or unsuitable subject"] += 1
        else:
            entries.append(Entry(path, title, description, tuple(fields["subject"]), creator))
    return entries


def rank(entries: list[Entry], dropped: Counter[str]) -> list[tuple[Entry, str]]:
    """Entries with captions, those first that say most in words of at least two authors."""
    users: dict[str, set[str]] = defaultdict(set)
    for e in entries:
        if not FIND["other_language"].search(e.creator):
            for word in words(" ".join([e.title, e.description, *e.keywords])):
                users[word].add(e.creator)
    vocabulary = {word for word, by in users.items() if len(by) > 1}
    ranked: list[tuple[int, str, Entry, str]] = []
    for e in entries:
        text = caption(e, vocabulary)
        known = len(set(words(text)) & vocabulary)
        foreign = FIND["other_language"].search(e.creator) or FIND["foreign"].search(e.title)
        if known > (1 if foreign else 0):
            ranked.append((-min(known, 5), key(e.path), e, text))
        else:
            dropped["says too little in common English words"] += 1
    return [(e, text) for _, _, e, text in sorted(ranked, key=lambda r: r[:2])]


def choose(
    ranked: list[tuple[Entry, str]], png: Path, dropped: Counter[str]
) -> list[tuple[Entry, str, Image.Image]]:
    """From the top, what still adds variety."""
    per_theme: Counter[str] = Counter()
    seen: dict[str, set[str]] = defaultdict(set)  # series -> captions without digits
    hashes = np.zeros(0, np.uint64)
    chosen: list[tuple[Entry, str, Image.Image]] = []
    for e, text in ranked:
        name, cap = theme(e.path)
        same, plain = seen[series(e.title)], re.sub(r"\d+", "", text.lower())
        if len(chosen) == RULES["total"]:
            dropped["not needed"] += 1
        elif per_theme[name] == cap:
            dropped["enough of its theme"] += 1
        elif plain in same or len(same) == RULES["per_series"]:
            dropped["same title or series"] += 1
        elif np.prod(Image.open(png / f"{e.path}.png").size) > RULES["largest"]:
            dropped["source too large"] += 1
        else:
            image = render(png / f"{e.path}.png")
            code = phash(image)
            if max(image.size) < RULES["smallest"]:
                dropped["drawing too small"] += 1
            elif max(image.size) > RULES["longest"] * min(image.size):
                dropped["drawing too long"] += 1
            elif np.any(np.bitwise_count(hashes ^ code) <= RULES["hamming"]):
                dropped["near-duplicate"] += 1
            else:
                per_theme[name] += 1
                same.add(plain)
                hashes = np.append(hashes, code)
                chosen.append((e, text, image))
    return chosen


def split(chosen: list[tuple[Entry, str, Image.Image]]) -> set[str]:
    """Paths of the validation pictures; a series stays on one side."""
    groups: dict[str, list[str]] = defaultdict(list)
    for e, _, _ in chosen:
        groups[series(e.title)].append(e.path)
    val: set[str] = set()
    for name in sorted(groups, key=key):
        if len(val) + len(groups[name]) <= RULES["val"]:
            val.update(groups[name])
    return val


def main() -> None:
    parser = argparse.ArgumentParser(description="Select the example data set.")
    for name in ("png", "svg", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = None  # `largest` is checked before decoding
    dropped: Counter[str] = Counter()
    chosen = choose(rank(read(args.png, args.svg, dropped), dropped), args.png, dropped)
    val = split(chosen)
    shutil.rmtree(args.out / "images", ignore_errors=True)
    (args.out / "images").mkdir(parents=True)
    with (args.out / "captions.jsonl").open("w", encoding="utf-8") as lines:
        for e, text, image in sorted(chosen, key=lambda c: c[0].path):
            suffix, data = encode(image)
            name = re.sub(r"[^a-z0-9]+", "_", e.path.lower()).strip("_") + suffix
            with (args.out / "images" / name).open("xb") as file:  # x: two names never meet
                file.write(data)
            side = "val" if e.path in val else "train"
            row = {"image": f"images/{name}", "captions": [text], "split": side}
            lines.write(json.dumps(row) + "\n")
    for reason, count in [("selected", len(chosen)), *dropped.most_common()]:
        print(f"{count:6} {reason}")


if __name__ == "__main__":
    main()
