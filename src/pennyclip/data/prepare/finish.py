"""What is found over all shards: groups, splits, the loader's table; and dataset.json."""

import json
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pennyclip.base.atomic import replacing, write_text
from pennyclip.data.duplicates import row_groups
from pennyclip.data.groups import split_rows, with_labels
from pennyclip.data.index import ROW, SCHEMA_VERSION
from pennyclip.data.order import I64
from pennyclip.data.prepare.claim import Claim

SHARD = ("rows", "bytes", "raw_bytes", "blake2b")  # what dataset.json takes of a manifest
DECIDES_BYTES = ("pillow", "simplejpeg", "torch", "numpy", "pyarrow")  # packages


def finish(claim: Claim) -> None:
    """Groups, splits and the loader's table over all shards; dataset.json makes it a dataset.

    It comes last, and says how many rows count: until then, an appended dataset is the old one.
    """
    out, request = claim.out, claim.request
    names = [f"{number:06d}" for number in range(claim.shards)]
    manifests = [_read(out / "index" / f"{name}.json") for name in names]
    tables = [pq.read_table(out / "index" / f"{name}.parquet") for name in names]
    table = pa.concat_tables(tables)
    before = _read(out / "dataset.json") if claim.batch else None
    first = before["counts"]["kept"] if before else 0

    inseparable, pictures = row_groups(table, request["near_bits"])
    splits, dropped = split_rows(
        inseparable,
        table["split"].to_pylist(),
        table["pixel_hash"].to_pylist(),
        val_share=request["val_share"],
        dev_share=request["dev_share"],
        seed=request["seed"],
        settled=_settled(out, before["splits"], first) if before else {},
        first=first,
    )
    groups = with_labels(inseparable, table["label"].to_pylist(), table["captions"].to_pylist())
    rows = _rows(table, [len(one) for one in tables], groups)
    rejects = [reject for found in manifests for reject in found["rejects"]]
    crossing = _earlier(out, first) if before else []
    crossing += _crossing(table, inseparable, splits, dropped)

    with replacing(out / "index" / "rows.npy") as partial, partial.open("wb") as file:
        np.save(file, rows)
    for name, ids in splits.items():
        with replacing(out / "keep" / f"{name}.parquet") as partial:
            pq.write_table(pa.table({"row": ids}), partial)
    _write_lines(out / "rejects.jsonl", rejects)
    _write_lines(out / "crossing.jsonl", crossing)

    fingerprint = blake2b(rows.tobytes(), digest_size=16)
    for found in manifests:
        fingerprint.update(bytes.fromhex(found["blake2b"]))
    reasons = Counter(reject["reason"].partition(":")[0] for reject in rejects)
    _, group_sizes = np.unique(groups, return_counts=True)
    equal = len(rows) - pc.count_distinct(table["pixel_hash"]).as_py()
    meta = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint.hexdigest(),
        "request": request,
        "preprocess": {
            **{name: request[name] for name in ("side", "fit", "quality", "max_pixels", "raw")},
            "resize": "bicubic, antialiased, never enlarged",
        },
        "versions": {name: version(name) for name in DECIDES_BYTES},
        "roots": [".", *request["roots"]],
        "shards": [
            {
                "path": f"shards/{name}.tar",
                "root": number % len(claim.roots),
                **{name: found[name] for name in SHARD if name in found},
            }
            for number, (name, found) in enumerate(zip(names, manifests, strict=True))
        ],
        "sources": _sources(request, table["source"].to_numpy()),
        "counts": {
            "inputs": sum(found["inputs"] for found in manifests),
            "kept": len(rows),
            "rejected": dict(reasons.most_common()),
            "captions": int(rows["captions"].sum()),
            "groups": len(group_sizes),
            "largest_group": int(group_sizes.max()),
            "equal_pictures": equal,
            "near_pictures": len(rows) - equal - len(np.unique(pictures)),
            "crossing": len(crossing),
        },
        "splits": {name: len(ids) for name, ids in sorted(splits.items())},
    }
    write_text(out / "dataset.json", json.dumps(meta, ensure_ascii=False, indent=1) + "\n")


def _rows(table: pa.Table, counts: list[int], groups: I64) -> npt.NDArray[np.void]:
    """What the loader reads, of all rows; `counts` are those of each shard."""
    rows = np.empty(len(table), ROW)
    rows["shard"] = np.repeat(np.arange(len(counts)), counts)
    rows["captions"] = pc.list_value_length(table["captions"]).to_numpy()
    rows["group"] = groups
    for name in ("image_offset", "image_length", "text_offset", "text_length"):
        rows[name] = table[name].to_numpy()
    return rows


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    write_text(file, "".join(lines))


def _settled(out: Path, names: Iterable[str], first: int) -> dict[str, I64]:
    """The splits of the rows before `first`. An append that was killed may have left more."""
    splits = {}
    for name in names:
        ids = pq.read_table(out / "keep" / f"{name}.parquet")["row"].to_numpy()
        splits[name] = ids[ids < first]
    return splits


def _earlier(out: Path, first: int) -> list[dict[str, Any]]:
    """What had to go of the rows before `first`; likewise, there may be more."""
    file = out / "crossing.jsonl"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        return [record for record in map(json.loads, lines) if record["row"] < first]


def _crossing(
    table: pa.Table, groups: I64, splits: dict[str, I64], dropped: I64
) -> list[dict[str, Any]]:
    """Rows that had to go, each with a row of another split that shows or says the same."""
    wanted = set(groups[dropped].tolist())
    held: dict[int, tuple[str, int]] = {}
    for name in ("val", "test", "dev", "train"):
        for row in splits.get(name, []):
            if groups[row] in wanted:
                held.setdefault(int(groups[row]), (name, int(row)))
    names = {n: table[n].to_pylist() for n in ("source_key", "origin", "split")}
    return [
        {
            "row": row,
            "key": names["source_key"][row],
            "origin": names["origin"][row],
            "split": names["split"][row] or "train",
            "repeats": {
                "row": other,
                "key": names["source_key"][other],
                "origin": names["origin"][other],
                "split": split,
            },
        }
        for row in dropped.tolist()
        for split, other in [held[int(groups[row])]]
    ]


def _sources(request: dict[str, Any], numbers: I64) -> list[dict[str, Any]]:
    """For each source, what it gave: its rows are neighbours."""
    return [
        {
            **{name: source[name] for name in ("path", "kind", "inputs")},
            "rows": np.searchsorted(numbers, [number, number + 1]).tolist(),
        }
        for number, source in enumerate(request["sources"])
    ]
