"""The curves of one run, each with what it is and what to look for."""

import math
from collections.abc import Sequence
from statistics import median

from pennyclip.reporting.markup import Html, note, section, table, tag
from pennyclip.reporting.plots import COLOURS, Series, chart, heat_map, spread
from pennyclip.reporting.run import DIRECTIONS, Run, chance, recall
from pennyclip.reporting.words import number, percent
from pennyclip.training.telemetry.metrics import Record, layer_order, rates_by_part

LOG_ABOVE = 20  # chosen: where the largest value is this many times the smallest, small ones vanish
WORDS = {"text_to_image": "text → image", "image_to_text": "image → text"}


def curves(run: Run) -> Html:
    """The section of all curves that this run has records for."""
    train = run.kind("train")
    ways = [_loss, _recall, _accuracy, _temperature, _rates, _norms, _layers, _trust]
    ways += [_throughput, _wait]
    figures = [draw(run, train) for draw in ways if draw is _recall or train]
    drawn = [figure for figure in figures if figure]
    intro = note(
        "One step is one update of the weights. Curves with many points show the mean, and the "
        "range as a band."
    )
    if not drawn:
        intro = note("Nothing to draw: no training or evaluation has been recorded yet.")
    return section("curves", "Curves", intro, tag("div", *drawn, class_="figures"))


def figure(title: str, drawing: Html, *caption: object) -> Html:
    return tag("figure", tag("h3", title), drawing, tag("figcaption", *caption))


def series(records: Sequence[Record], key: str, name: str = "", colour: int = 0) -> Series:
    """One field of the records that have it."""
    having = [record for record in records if key in record]
    values = [number(record[key]) for record in having]
    return Series(name or key, [record["step"] for record in having], values, colour)


def _last(curve: Series, form: str) -> str:
    return format(curve.values[-1], form) if len(curve.values) else "none"


def _loss(run: Run, train: list[Record]) -> Html | None:
    curve = series(train, "loss", "loss")
    if not curve.values:
        return None
    broken = sum(not math.isfinite(value) for value in curve.values)
    candidates = number(run.last_train.get("candidates"))
    level = None
    guess = ""
    if candidates > 1 and run.loss != "sigmoid":  # whose pairs are judged one by one
        level = (math.log(candidates), f"chance, ln {candidates:.0f} = {math.log(candidates):.2f}")
        guess = (
            f" Guessing among the batch's {candidates:.0f} candidates costs "
            f"ln {candidates:.0f} = {math.log(candidates):.2f}."
        )
    caption = (
        "How surprised the model is by the true partner of each image and caption; lower is "
        f"better.{guess} Last: {_last(curve, '.3f')}."
    )
    warning = None
    if broken:
        verb = "records had" if broken > 1 else "record had"
        warning = tag("strong", f" {broken} {verb} a loss that is not a finite number.")
    events = (r for r in run.kind("event") if not r.get("abandoned"))
    backs = [r["step"] for r in events if r.get("name") == "rolled back"]
    mark = (backs, "rolled back") if backs else None
    return figure("Loss", chart([curve], "loss (nats)", level=level, mark=mark), caption, warning)


def _recall(run: Run, _: list[Record]) -> Html | None:
    records = run.choosing
    if not records:
        return None
    drawn = [
        Series(
            f"{WORDS[direction]} R@{k}",
            [record["step"] for record in records],
            [recall(record, direction, k) for record in records],
            colour,
            "solid" if k == 10 else "dashed",
        )
        for k in (10, 1)
        for colour, direction in enumerate(DIRECTIONS)
    ]
    best = run.best_step
    mark = (best, f"best, step {best:,}") if best is not None else None
    guess = chance(run, records[-1], 10)
    return figure(
        f"Recall on the split “{run.choosing_split}”",
        chart(drawn, "recall", percent=True, mark=mark, points=len(records) <= 40),
        "R@10: share of captions whose own picture is among the ten best-scored ones "
        "(text → image), and the other way round; higher is better.",
        f" Chance for R@10: {percent(guess)}." if math.isfinite(guess) else None,
    )


def _accuracy(run: Run, train: list[Record]) -> Html | None:
    curve = series(train, "accuracy", "accuracy")
    if not curve.values:
        return None
    candidates = number(run.last_train.get("candidates"))
    level = (1 / candidates, f"chance, 1 of {candidates:.0f}") if candidates > 1 else None
    return figure(
        "Accuracy within the batch",
        chart([curve], "share found first", percent=True, level=level),
        "Share of training pairs whose true partner scores highest in their batch. Close to "
        "100 % early on: the batch is too easy, or its captions repeat. "
        f"Last: {percent(curve.values[-1])}.",
    )


def _temperature(run: Run, train: list[Record]) -> Html | None:
    logs = series(train, "logit_scale", "logit scale")
    if not logs.values:
        return None
    curve = Series("logit scale", logs.steps, [math.exp(min(v, 50)) for v in logs.values])
    logits = run.start.get("logits") or {}
    begin, limit = number(logits.get("initial_scale")), number(logits.get("max_scale"))
    begins = f", starts near {begin:.0f} (temperature {1 / begin:.2f})" if begin > 0 else ""
    bounded = math.isfinite(limit)
    ends = f" and may not pass {limit:.0f}" if bounded else ""
    level = (limit, f"limit, {limit:.0f}") if bounded and max(curve.values) > limit / 2 else None
    return figure(
        "Temperature",
        chart([curve], "logit scale = 1 / temperature", level=level),
        "Similarities are multiplied by this before they are compared: how sharply the model "
        f"tells pairs apart. It is learned{begins}{ends}. Last: {_last(curve, '.1f')}, temperature "
        f"{1 / curve.values[-1]:.4f}.",
    )


def _rates(run: Run, train: list[Record]) -> Html | None:
    records = [record for record in train if isinstance(record.get("lr"), dict)]
    rates = [rates_by_part(record["lr"]) for record in records]
    parts = list(dict.fromkeys(part for rate in rates for part in rate))
    drawn: list[Series] = []
    for part in parts:
        # A part that is frozen in some stage has no rate there: a gap in its curve.
        values = [rate.get(part, math.nan) for rate in rates]
        if any(value > 0 for value in values):
            drawn.append(Series(part, [r["step"] for r in records], values, len(drawn)))
    if not drawn:
        return None
    peaks = [max(value for value in curve.values if value > 0) for curve in drawn]
    return figure(
        "Learning rate by part",
        chart(drawn, "learning rate", log=spread(peaks) >= LOG_ABOVE),
        "How far one update may move the weights of each part (of a part whose layers learn at "
        "different rates, the fastest). It warms up, then falls; a part without a curve is "
        "frozen. Peak: "
        + ", ".join(f"{c.name} {peak:.1e}" for c, peak in zip(drawn, peaks, strict=True))
        + ".",
    )


def _norms(run: Run, train: list[Record]) -> Html | None:
    curve = series(train, "grad_norm", "norm")
    if not curve.values:
        return None
    limit = number(run.config.get("optim", {}).get("clip_norm"))
    level = (limit, f"clipped above {limit:g}") if math.isfinite(limit) else None
    clipped = [number(record["clipped"]) for record in train if "clipped" in record]
    share = (
        f" {percent(sum(clipped) / len(clipped))} of the updates were clipped." if clipped else ""
    )
    return figure(
        "Gradient norm",
        chart([curve], "norm before clipping", level=level, log=spread(curve.values) >= LOG_ABOVE),
        "Length of the gradient over all parameters; beyond the line it is shortened to it. A "
        f"curve that keeps climbing announces trouble.{share}",
    )


def _layers(run: Run, train: list[Record]) -> Html | None:
    """The norm of every layer over time, as a picture, and in numbers below."""
    records = [record for record in train if isinstance(record.get("grad_norms"), dict)]
    order = layer_order([list(record["grad_norms"]) for record in records])
    if not order:
        return None
    rows = {
        layer: [number(record["grad_norms"].get(layer)) for record in records] for layer in order
    }
    picture = heat_map(rows, [record["step"] for record in records], "gradient norm")
    numbers = []
    for layer, values in rows.items():
        steps = [(v, r["step"]) for v, r in zip(values, records, strict=True) if math.isfinite(v)]
        means = [r["grad_means"][layer] for r in records if layer in r.get("grad_means", {})]
        if not steps:
            numbers.append((layer, *["none is finite"] * 4))
            continue
        largest, at = max(steps, key=lambda found: found[0])
        middle = median(value for value, _ in steps)
        mean = f"{number(means[-1]):.1e}" if means else "none"
        numbers.append(
            (layer, f"{middle:.2g}", f"{largest:.2g} in {at:,}", f"{steps[-1][0]:.2g}", mean)
        )
    return figure(
        "Gradient norm by layer",
        picture,
        "Each line is a layer, the input of a tower above its output; a gap: frozen, or not finite "
        "there. A line that lights up before the others is where trouble began, one that stays "
        "dark learns nothing.",
        tag(
            "details",
            tag("summary", f"{len(numbers)} layers in numbers"),
            table(("layer", "median", "largest", "last", "mean of its gradient"), numbers, 4),
        ),
    )


def _trust(run: Run, train: list[Record]) -> Html | None:
    """LAMB's ratios, of the groups that decay: the others' vectors say little."""
    records = [record for record in train if isinstance(record.get("trust_ratio"), dict)]
    groups = [g for record in records for g in record["trust_ratio"] if "no_decay" not in g]
    drawn = [
        Series(
            group,
            [record["step"] for record in records],
            [number(record["trust_ratio"].get(group)) for record in records],
            colour % len(COLOURS),
        )
        for colour, group in enumerate(dict.fromkeys(groups))
    ]
    if not drawn:
        return None
    values = [value for curve in drawn for value in curve.values if value > 0]
    return figure(
        "Trust ratio",
        chart(drawn, "|weights| / |update|", log=bool(values) and spread(values) >= LOG_ABOVE),
        "LAMB makes each tensor's step as long as its weights, times the rate: by this the update "
        "is multiplied (the median over the tensors of a group). A ratio that falls towards 0 "
        "marks weights that shrink or gradients that explode.",
    )


def _throughput(run: Run, train: list[Record]) -> Html | None:
    curve = series(train, "samples_per_second", "samples a second")
    if not curve.values:
        return None
    middle = sorted(curve.values)[len(curve.values) // 2]
    return figure(
        "Throughput",
        chart([curve], "samples / s"),
        f"Image-text pairs trained on a second. Median: {middle:,.0f}.",
    )


def _wait(run: Run, train: list[Record]) -> Html | None:
    curve = series(train, "input_wait", "waiting")
    if not curve.values:
        return None
    mean = sum(curve.values) / len(curve.values)
    return figure(
        "Waiting for input",
        chart([curve], "share of the time", percent=True),
        "Share of the time in which training stood still because no batch was read and decoded "
        f"yet. Mean: {percent(mean)}. Much of it: more workers, or smaller stored images.",
    )
