"""Pictures that an image tower finds alike: crops, flips and other colours, which no hash finds."""

import numpy as np
import torch

from pennyclip.commands.filter.rules import Mask
from pennyclip.data.order import I64
from pennyclip.evaluation.embeddings import Embeddings
from pennyclip.evaluation.features import Progress, silent

BLOCK = 1024  # chosen: a large matrix product, and few by hand
PART = 1 << 16  # chosen: cosines of 256 MB


@torch.no_grad()
def distinct(
    embeddings: Embeddings,
    rows: I64,
    limit: float,
    device: torch.device,
    progress: Progress = silent,
    *,
    block: int = BLOCK,
    part: int = PART,
) -> tuple[Mask, list[tuple[int, int, float]]]:
    """Keep rows that are not too close to one kept before.

    Every pair is looked at: N^2 D / 2 multiplications, so ten times the rows take a hundred times
    as long (`docs/filter.md` says how long). Memory grows with N: 4 D bytes a row, 2 GB for a
    million rows of 512 numbers.

    Args:
        embeddings: of all rows.
        rows: [N] those to choose from, the preferred ones first.
        limit: largest cosine between two that are kept.
        progress: told of the rows gone through; a later one takes longer.
        block: rows compared at a time,
        part: and kept ones that they are compared with.

    Returns:
        [N] which are kept, and for each of the others: the row, the kept one, and their cosine.
    """
    kept = torch.empty(len(rows), embeddings.parts[0].shape[1], device=device)
    numbers = np.empty(len(rows), np.int64)
    count, mask = 0, np.zeros(len(rows), np.bool_)
    dropped: list[tuple[int, int, float]] = []
    for start in range(0, len(rows), block):
        some = rows[start : start + block]
        vectors = embeddings.take(some).to(device)
        vectors /= vectors.norm(dim=1, keepdim=True)  # float16 has rounded them
        among = (vectors @ vectors.T).cpu()
        closest = torch.full((len(some),), -1.0)
        where = torch.zeros(len(some), dtype=torch.int64)
        for first in range(0, count, part):
            cosines = vectors @ kept[first : min(count, first + part)].T
            cosine, place = (best.cpu() for best in cosines.max(1))
            closer = cosine > closest
            closest = torch.where(closer, cosine, closest)
            where = torch.where(closer, place + first, where)
        inside: list[int] = []
        for i, row in enumerate(some.tolist()):
            best, twin = float(closest[i]), int(numbers[where[i]])
            if inside:
                value, place = among[i, inside].max(0)
                if float(value) > best:
                    best, twin = float(value), int(some[inside[int(place)]])
            if best > limit:
                dropped.append((row, twin, best))
            else:
                inside.append(i)
        mask[[start + i for i in inside]] = True
        kept[count : count + len(inside)] = vectors[inside]
        numbers[count : count + len(inside)] = some[inside]
        count += len(inside)
        progress("rows compared", start + len(some), len(rows))
    return mask, dropped
