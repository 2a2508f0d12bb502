"""Zero-shot classification: a folder a class, and the class names as captions."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from pennyclip.base.errors import RequestError, did_you_mean
from pennyclip.data.images import ImageError, decode
from pennyclip.evaluation.result import TIE, Encode, Result, mean_rank, require_finite
from pennyclip.evaluation.templates import TEMPLATES

CONFUSIONS = 20  # pairs of classes listed. chosen: a screenful


def zeroshot(
    encode: Encode,
    folder: Path,
    names: Mapping[str, str] | None = None,
    templates: Sequence[str] = TEMPLATES,
    chunk: int = 32,
) -> Result:
    """Classify pictures by the class name whose embedding is nearest (Radford et al. 2021, 3.1).

    Classes that score the same share their mean rank, so a model that cannot tell them apart
    scores no hit at 1. A picture that cannot be read is left out, counted and listed.

    Args:
        encode: the model.
        folder: holds one folder a class; its name with spaces for "_" and "-" is the class.
        names: other names for some of the folders.
        templates: sentences with "{}" where the class name goes; their mean is the class.
        chunk: pictures held decoded at a time. (chosen: 32 of 12 megapixels are 1.2 GB.)

    Returns:
        metrics `top1`, `top5` (where there are more than 5 classes), `mean_per_class` (top-1, each
        class counting the same), as shares, and the counts `images`, `unreadable`, `classes`;
        tables `classes`, `confusions` and `unreadable`.

    Raises:
        RequestError: fewer than two classes, a class without files, two of the same name,
            nothing readable.
        RunError: a feature is NaN or infinite.
    """
    classes = _classes(folder, names or {})
    files = [(label, file) for label, one in enumerate(classes) for file in _files(folder / one)]
    prototypes = _class_embeddings(encode, list(classes.values()), templates)

    features: list[Float[Tensor, "N D"]] = []
    labels: list[int] = []
    unreadable: list[dict[str, Any]] = []
    for start in range(0, len(files), chunk):
        images = []
        for label, file in files[start : start + chunk]:
            try:
                images.append(Image.fromarray(decode(file.read_bytes()).pixels))
            except (ImageError, OSError) as error:
                name = file.relative_to(folder).as_posix()
                unreadable.append({"file": name, "reason": str(error)})
            else:
                labels.append(label)
        if images:
            features.append(encode.encode_image(images).cpu())
            require_finite(features[-1], f"image features from {files[start][1]} on")
    if not labels:
        raise RequestError(
            f"none of the {len(files)} files in {folder} is a readable picture. The first: "
            f"{unreadable[0]['file']}: {unreadable[0]['reason']}. Check that this is a folder of "
            "class folders with pictures."
        )
    return _score(torch.cat(features), prototypes, torch.tensor(labels), classes, unreadable)


def read_names(file: Path) -> dict[str, str]:
    """Folder names and the class names to use for them: one JSON object.

    Raises:
        RequestError: the file is missing or is something else.
    """
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"class names: {file} can't be read as JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(n, str) and n for n in names.values()):
        raise RequestError(
            f'{file}: expected one JSON object of folder and class name, such as {{"n02084071": '
            f'"dog"}}, found {str(names)[:60]}.'
        )
    return names


def _classes(folder: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Folder name to class name, in alphabetical order of folders."""
    found = [one.name for one in folder.iterdir() if one.is_dir()] if folder.is_dir() else []
    found = sorted(name for name in found if not name.startswith("."))
    if len(found) < 2:
        raise RequestError(
            f"expected at least two class folders in {folder}, found {len(found)}"
            f"{': ' + found[0] if found else ''}. Give the folder that holds one folder of "
            "pictures a class."
        )
    for name in names:
        if name not in found:
            hint = did_you_mean(name, found) or f" It has: {', '.join(found[:20])}."
            raise RequestError(f"class names: {folder} has no folder '{name}'.{hint}")
    classes = {
        name: names.get(name) or " ".join(name.replace("_", " ").replace("-", " ").split())
        for name in found
    }
    folders: dict[str, str] = {}
    for name, title in classes.items():
        other = folders.setdefault(title.casefold(), name)
        if other != name:
            raise RequestError(
                f"the folders '{other}' and '{name}' in {folder} both mean the class '{title}'. "
                "Join them, or give one of them another name in the file of class names."
            )
    return classes


def _files(folder: Path) -> list[Path]:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and not f.name.startswith("."))
    if not files:
        raise RequestError(
            f"the class folder {folder} is empty. Put pictures there, or remove the folder."
        )
    return files


def _class_embeddings(
    encode: Encode, classes: list[str], templates: Sequence[str]
) -> Float[Tensor, "C D"]:
    texts = [template.replace("{}", name) for name in classes for template in templates]
    features = encode.encode_text(texts).cpu()
    require_finite(features, "text features of the class names")
    mean = features.double().view(len(classes), len(templates), -1).mean(dim=1)
    return F.normalize(mean, dim=1)


def _score(
    features: Float[Tensor, "N D"],
    prototypes: Float[Tensor, "C D"],
    labels: Tensor,
    classes: Mapping[str, str],
    unreadable: list[dict[str, Any]],
) -> Result:
    scores = features.double() @ prototypes.T
    own = scores.gather(1, labels[:, None])
    scores.scatter_(1, labels[:, None], -torch.inf)  # what remains are the rivals
    above = scores - own
    rank = mean_rank((above > TIE).sum(dim=1), (above.abs() <= TIE).sum(dim=1))
    right = rank <= 1
    rival = scores.argmax(dim=1)

    titles = list(classes.values())
    total = torch.bincount(labels, minlength=len(titles))
    hits = torch.bincount(labels[right], minlength=len(titles))
    share = hits.double() / total  # NaN for a class of unreadable files only: it has no accuracy
    metrics = {"top1": right.double().mean().item()}
    if len(titles) > 5:
        metrics["top5"] = (rank <= 5).double().mean().item()
    metrics |= {
        "mean_per_class": share[total > 0].mean().item(),
        "images": float(len(labels)),
        "unreadable": float(len(unreadable)),
        "classes": float(len(titles)),
    }
    per_class = [
        {"class": title, "folder": name, "images": n, "top1": hit / n if n else None}
        for (name, title), n, hit in zip(
            classes.items(), total.tolist(), hits.tolist(), strict=True
        )
    ]
    pairs = Counter(zip(labels[~right].tolist(), rival[~right].tolist(), strict=True))
    confusions = [
        {
            "class": titles[label],
            "taken_for": titles[other],
            "images": count,
            "share": count / int(total[label]),
        }
        for (label, other), count in pairs.most_common(CONFUSIONS)
    ]
    tables = {"classes": per_class, "confusions": confusions, "unreadable": unreadable}
    hits_of = {"top1": 1, "top5": 5, "mean_per_class": 1}
    chance = {name: n / len(titles) for name, n in hits_of.items() if name in metrics}
    return Result(metrics, tables, chance)
