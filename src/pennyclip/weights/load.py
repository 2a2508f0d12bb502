"""Copy a file's tensors into a tower, and account for every one of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import trunk_state
from pennyclip.weights import resample
from pennyclip.weights.describe import UNSEEN, describe
from pennyclip.weights.layouts import (
    ALL,
    LAYOUTS,
    TEMPERATURE,
    Layout,
    Rows,
    Rule,
    Tower,
    matching,
    recognise,
)
from pennyclip.weights.match import LayerShare, Match, few
from pennyclip.weights.read import WeightsFile
from pennyclip.weights.statements import Statements

PREFIX = {"image": "visual.", "text": "text."}
COUNTER = "num_batches_tracked"  # of BatchNorm: old files lack it, and nothing here reads it


class _Misfit(Exception):
    """Why a tensor cannot be copied to where its key belongs."""


@dataclass
class _Transfer:
    """The loading of one tower, key by key."""

    model: CLIP
    tower: Tower
    with_temperature: bool
    drop_keys: tuple[str, ...]
    targets: dict[str, Tensor] = field(default_factory=dict)
    filled: dict[str, set[Rows]] = field(default_factory=dict)
    """Name of a parameter -> which of its rows were copied."""
    matched: dict[str, str] = field(default_factory=dict)
    resampled: dict[str, str] = field(default_factory=dict)
    derived: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    left_over: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    matrices: int = 0
    zeros: int = 0
    """Of the matrices that were copied, how many hold nothing but zeros."""

    def __post_init__(self) -> None:
        for name, value in self.model.state_dict().items():
            if name.startswith(PREFIX[self.tower]) or TEMPERATURE.fullmatch(name):
                self.targets[name] = value

    def place(self, key: str, value: Tensor, layout: Layout, others: list[Layout]) -> None:
        """Decide what becomes of one key."""
        if pattern := next((p for p in self.drop_keys if fnmatchcase(key, p)), None):
            self.dropped[key] = f"left out by the recipe ({pattern})"
        elif TEMPERATURE.fullmatch(key):
            self._temperature(key, value)
        elif not re.fullmatch(layout.scope, key):
            if any(re.fullmatch(other.scope, key) for other in others):
                self.dropped[key] = "belongs to the other tower"
            else:
                self.left_over[key] = "belongs to neither tower"
        else:
            self._by_rules(key, value, matching(key, layout.rules, self.targets))

    def _temperature(self, key: str, value: Tensor) -> None:
        if not self.with_temperature:
            self.dropped[key] = "fits only together with both of its towers"
        elif key not in self.targets:
            self.dropped[key] = "of the sigmoid loss, which this model does not use"
        elif why := _damage(value, self.targets[key]):
            self.damaged[key] = why
        else:
            self.targets[key].copy_(value.reshape(self.targets[key].shape))
            self.matched[key] = key

    def _by_rules(self, key: str, value: Tensor, rules: list[tuple[Rule, str]]) -> None:
        if not rules:
            self.left_over[key] = "no part of this tower has such a key"
        for rule, name in rules:
            if rule.to is None:
                fate = self.left_over if rule.refused else self.dropped
                (self.derived if rule.derived else fate)[key] = rule.reason
                continue
            try:
                self._copy(key, name, value, rule)
            except _Misfit as reason:
                if name == "visual.head.proj.bias" and not value.any():
                    self.dropped[key] = "a bias of zeros, and the head here has none"
                else:
                    self.left_over[key] = str(reason)

    def _copy(self, key: str, name: str, value: Tensor, rule: Rule) -> None:
        if name not in self.targets:
            raise _Misfit(f"the tower has no {name}{self._hint(name, value)}")
        if rule.put in self.filled.get(name, ()):
            raise _Misfit(f"another key of the file fills {name} too")
        if why := _damage(value, self.targets[name]):
            self.damaged[key] = why
            return
        target = _rows(self.targets[name], rule.put)
        value = _rows(value.T if rule.transpose else value, rule.take)
        method = None
        if value.shape != target.shape:
            value, method = self._resize(name, value, target)
        target.copy_(value)
        if value.ndim > 1 and not value.is_meta:
            self.matrices += 1
            self.zeros += not value.any()
        self.filled.setdefault(name, set()).add(rule.put)
        if method:
            self.resampled[key] = method
        else:
            # One tensor of the file may hold several of ours.
            self.matched[key] = f"{self.matched[key]}, {name}" if key in self.matched else name

    def _resize(self, name: str, value: Tensor, target: Tensor) -> tuple[Tensor, str | None]:
        """Bring a tensor to the tower's shape, where that has a meaning."""
        if _squeezed(value) == _squeezed(target):
            return value.reshape(target.shape), None
        manner = self.model.config.image.resample
        if value.shape[-1] == target.shape[-1] and name == "visual.trunk.pos_embed":
            trunk = self.model.visual.trunk
            prefix = 0 if getattr(trunk, "no_embed_class", False) else trunk.num_prefix_tokens
            positions = value.reshape(1, *value.shape[-2:])
            try:
                return resample.image_positions(
                    positions, trunk.patch_embed.grid_size, prefix, manner
                )
            except ValueError as error:
                raise _Misfit(str(error)) from error
        if name == "visual.trunk.patch_embed.proj.weight" and value.shape[:2] == target.shape[:2]:
            return resample.patch_kernel(value, (target.shape[2], target.shape[3]), manner)
        if name == "text.positional_embedding" and value.shape[-1] == target.shape[-1]:
            return resample.text_positions(value, len(target))
        raise _Misfit(
            f"shape {list(value.shape)}, and the tower's {name} has {list(target.shape)}"
            + self._hint(name, value)
        )

    def _hint(self, name: str, value: Tensor) -> str:
        """What to do about a tensor that has no place."""
        if re.fullmatch(r"text\.transformer\.resblocks\.\d+\.mlp\.c_(fc|proj)\.weight", name):
            return ": a CLIP text tower has MLPs of 4 times its width, and no others can be built"
        if not name.startswith("visual.head.proj"):
            return ""
        if value.shape[0] == self.model.config.embed_dim:
            return ". Set model.image.head = linear and head_bias = true, as the file has it"
        return (
            f". A head of {value.shape[0]} outputs is no head into this embedding space; to do "
            'without it, set model.image.drop_keys = ["head.*"]'
        )

    def refuse_damage(self, file: str) -> None:
        """Raises RequestError where no training could start from what the tensors hold."""
        if self.damaged:
            raise RequestError(
                f"the weights {file} hold {len(self.damaged)} tensors for the {self.tower} tower "
                "that are no weights: expected finite floating-point numbers. Is the file "
                "quantised, or damaged? Take the original, or download it again.\n"
                + "\n".join(few([f"{key}: {why}" for key, why in self.damaged.items()]))
            )
        if self.matrices and self.zeros == self.matrices:
            raise RequestError(
                f"every matrix that the weights {file} hold for the {self.tower} tower "
                f"({self.matrices}, first {next(iter(self.matched | self.resampled))}) is zero. "
                "Expected trained weights: is the file damaged, or only a placeholder?"
            )

    def complete(self, name: str) -> bool:
        """Whether all rows of a parameter were copied."""
        parts = self.filled.get(name, set())
        return bool(parts) and len(parts) == next(iter(parts))[2]


@torch.no_grad()
def load_tower(
    model: CLIP,
    tower: Tower,
    file: WeightsFile,
    *,
    said: Statements,
    layout: Layout | None = None,
    drop_keys: tuple[str, ...] = (),
    new_keys: tuple[str, ...] = (),
    with_temperature: bool = False,
    note: str | None = None,
) -> Match:
    """Copy what fits from a file into one tower, in the tower's dtypes.

    Args:
        model: changed in place; on the meta device only the report is made.
        tower: which one.
        file: it may hold both towers.
        said: what the file says about itself.
        layout: how its keys are named; unset: recognised from them.
        drop_keys: patterns of the file's keys that may be left out.
        new_keys: patterns of our parameters, without the tower's prefix, that may stay random.
        with_temperature: load the temperature too: both towers come from this file.
        note: for the report: what the file leaves open and had to be guessed.

    Raises:
        RequestError: one of the patterns matches nothing; a tensor is not finite or of integers;
            every matrix is zero.
    """
    transfer = _Transfer(model, tower, with_temperature, drop_keys)
    layout = layout or recognise(file.state, tower)
    others = [
        o for o in LAYOUTS
        if o.tower != tower and o.scope != ".+"
        and any(re.fullmatch(o.marker, key) for key in file.state)
    ]  # fmt: skip
    transfer.derived |= {k: w for k, w in file.folded.items() if re.fullmatch(layout.scope, k)}
    for key, value in file.state.items():
        transfer.place(key, value, layout, others)
    transfer.refuse_damage(file.name)
    _refuse_idle(drop_keys, file.state, f"model.{tower}.drop_keys", file.name)
    unfinished = {n for n in transfer.filled if not transfer.complete(n)}
    for key, name in list(transfer.matched.items()):
        if name in unfinished:
            transfer.left_over[key] = f"fills only a part of {name}"
            del transfer.matched[key]

    part = model.visual if tower == "image" else model.text
    prefix = PREFIX[tower]
    layers = [(f"layer {i}", names) for i, names in enumerate(part.layers())]
    trunk_names = [f"{prefix}{name}" for _, names in layers for name in names]
    # Running statistics are part of a trunk, though they do not learn.
    known, of_trunk = set(trunk_names), {f"{prefix}{name}" for name in trunk_state(part)}
    head: list[str] = []
    for name in transfer.targets:
        if name in known or name.endswith(COUNTER) or TEMPERATURE.fullmatch(name):
            continue
        (trunk_names if name in of_trunk else head).append(name)
    absent = [name for name in trunk_names if not transfer.complete(name)]
    allowed = [n for n in absent if _allowed(n.removeprefix(prefix), new_keys)]
    _refuse_idle(
        new_keys,
        [n.removeprefix(prefix) for n in absent],
        f"model.{tower}.new_keys",
        f"what {file.name} leaves random",
    )

    def share(label: str, names: Iterable[str]) -> LayerShare:
        sizes = {name: transfer.targets[name].numel() for name in names}
        return LayerShare(
            label, sum(sizes.values()), sum(sizes[n] for n in sizes if transfer.complete(n))
        )

    shares = [share(label, [prefix + n for n in names]) for label, names in layers]
    counted = {f"{prefix}{name}" for _, names in layers for name in names}
    if statistics := [name for name in trunk_names if name not in counted]:
        shares.append(share("statistics", statistics))
    shares.append(share("head", head))
    found = describe(file.state, norm_order=said.norm_order) if tower == "image" else None
    trunk = model.visual.trunk
    built = describe(trunk.state_dict(), trunk) if found else None
    return Match(
        tower=f"{tower} tower",
        file=file.name,
        layout=layout.name,
        trained=said.trained,
        matched=transfer.matched,
        resampled=transfer.resampled,
        derived=transfer.derived,
        dropped=transfer.dropped,
        left_over=transfer.left_over,
        new=allowed + [name for name in head if not transfer.complete(name)],
        missing=[name for name in absent if name not in allowed],
        layers=shares,
        architecture=found,
        differences=found.differences(built) if found and built else [],
        conflicts=found.differences(built, UNSEEN) if found and built else [],
        note=note,
    )


def _damage(value: Tensor, target: Tensor) -> str | None:
    """Why a tensor's numbers cannot be a parameter's, if so."""
    if value.is_meta or not target.is_floating_point():
        return None
    if not value.is_floating_point():
        return f"of type {str(value.dtype).removeprefix('torch.')}, not floating point"
    wide = value.float() if value.element_size() == 1 else value  # no isfinite for 8 bits
    if count := value.numel() - int(wide.isfinite().sum()):
        return f"{count} of its {value.numel()} numbers are not finite"
    return None


def _rows(value: Tensor, rows: Rows) -> Tensor:
    if rows == ALL:
        return value
    start, stop, of = rows
    if value.shape[0] % of:
        raise _Misfit(f"{value.shape[0]} rows are not {of} equal parts")
    step = value.shape[0] // of
    return value[start * step : stop * step]


def _squeezed(value: Tensor) -> list[int]:
    return [size for size in value.shape if size != 1]


def _allowed(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_idle(patterns: tuple[str, ...], names: Iterable[str], key: str, where: str) -> None:
    """A pattern that matches nothing is a mistake in the recipe."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RequestError(f"{key}: '{pattern}' matches nothing in {where}. Take it out.")
