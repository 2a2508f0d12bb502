"""Two ONNX graphs, one a tower: what goes in needs no preparation that could go wrong.

    image.onnx    images uint8 [N, 3, S, S]                      -> embeddings float32 [N, D]
    text.onnx     tokens int64 [N, L], lengths int64 [N]         -> embeddings float32 [N, D]

Normalisation of the pixels is part of the graph, embeddings have unit norm, N and L are free.
"""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from pennyclip.base.errors import RequestError, RunError
from pennyclip.commands.export.probe import TOLERANCE, captions, pictures
from pennyclip.commands.export.tokenizer import write_clip_tokenizer
from pennyclip.commands.export.written import FOLDER, Source, Written
from pennyclip.config.keys import ClipText
from pennyclip.evaluation.encoder import make_tokenizer
from pennyclip.model.clip import CLIP, TextTower
from pennyclip.model.image import ImageTower
from pennyclip.weights.checkpoint import TEXT_FILES, write_json

BATCHES = (1, 3)  # sizes at which a graph is checked; it is made at 2
SINGLE_FILE = 2**31 - 2**24  # bytes of weights: a protobuf message ends at 2 GiB


class ImageGraph(nn.Module):
    """Pixels to unit-norm embeddings."""

    def __init__(self, tower: ImageTower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, images: UInt8[Tensor, "N 3 S S"]) -> Float[Tensor, "N D"]:
        return F.normalize(self.tower(images).float(), dim=-1)


class TextGraph(nn.Module):
    """Token ids to unit-norm embeddings."""

    def __init__(self, tower: TextTower) -> None:
        super().__init__()
        self.tower = tower
        tower.packed = False  # the shapes in a graph must not depend on the lengths

    def forward(
        self, tokens: Int64[Tensor, "N L"], lengths: Int64[Tensor, " N"]
    ) -> Float[Tensor, "N D"]:
        return F.normalize(self.tower(tokens, lengths).float(), dim=-1)


def write(source: Source, folder: Path) -> Written:
    """Write both towers, and check each with onnxruntime.

    Raises:
        RequestError: the packages for it are not installed.
        RunError: a tower cannot be written, or gives other embeddings in onnxruntime.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"an export to ONNX needs the package {error.name}, which is not installed. Install "
            "it with: pip install 'pennyclip[export]'"
        ) from error
    model = source.model
    images = [{"images": pictures(model)[:batch]} for batch in BATCHES]
    tokens, lengths = captions(make_tokenizer(model.config, source.checkpoint))
    texts = [
        {"tokens": tokens[:batch, : int(lengths[:batch].max())], "lengths": lengths[:batch]}
        for batch in BATCHES
    ]
    batch, length = {0: "batch"}, {0: "batch", 1: "length"}
    made = {
        _graph(ImageGraph(model.visual), folder / "image.onnx", images, {"images": batch}),
        _graph(
            TextGraph(model.text),
            folder / "text.onnx",
            texts,
            {"tokens": length, "lengths": batch},
        ),
    }
    write_json(folder / "model.json", _description(model))
    if isinstance(model.config.text, ClipText) and model.config.text.tokenizer is None:
        write_clip_tokenizer(folder)
    for name in TEXT_FILES:
        if (source.checkpoint / name).is_file():
            shutil.copyfile(source.checkpoint / name, folder / name)
    call = f"import onnxruntime; onnxruntime.InferenceSession('{FOLDER}/image.onnx')"
    return Written(
        layout=f"ONNX, one graph a tower (torch's {' and '.join(sorted(made))} exporter)",
        python=call,
        notes=(
            "Pictures go in as uint8 RGB, cut to their centred square and resized to the model's "
            "size (bicubic with antialiasing); the graph normalises them.",
            "A caption's length counts its start and end tokens; what stands behind is ignored.",
        ),
    )


def _graph(
    module: nn.Module, path: Path, inputs: list[dict[str, Tensor]], free: dict[str, dict[int, str]]
) -> str:
    """Write one graph, and check it.

    Args:
        module: what to write.
        path: where.
        inputs: batches of different sizes; it is made with two rows of the largest.
        free: names of the dimensions that a caller may choose, by input and axis.

    Returns:
        Which of torch's exporters made it.
    """
    module.eval()
    example = tuple(value[:2] for value in inputs[-1].values())
    size = sum(value.numel() * value.element_size() for value in module.state_dict().values())
    options: dict[str, Any] = {
        "input_names": list(free),
        "output_names": ["embeddings"],
        "external_data": size > SINGLE_FILE,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations, inside its exporter
        try:
            torch.onnx.export(
                module, example, path, dynamo=True, dynamic_shapes=free, verbose=False, **options
            )
            made = "dynamo"
        except Exception as dynamo:
            try:
                torch.onnx.export(module, example, path, dynamo=False, dynamic_axes=free, **options)
                made = "legacy"
            except Exception as legacy:
                raise RunError(
                    f"torch {torch.__version__} cannot write this tower as ONNX: {dynamo} (and its "
                    f"older exporter: {legacy}). Export with --to open_clip instead."
                ) from dynamo
    for batch in inputs:
        _check(module, path, batch)
    return made


@torch.no_grad()
def _check(module: nn.Module, path: Path, inputs: dict[str, Tensor]) -> None:
    """Compare a graph with what it was made from.

    Raises:
        RunError: they differ.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    worst = (torch.from_numpy(found) - module(**inputs)).abs().max().item()
    if not worst <= TOLERANCE:
        raise RunError(
            f"{path.name} gives other embeddings in onnxruntime {onnxruntime.__version__} at batch "
            f"{len(found)}: they differ by {worst:.1e}, and {TOLERANCE:.0e} is rounding. This is a "
            "fault in pennyclip: please report it with the run's config.toml."
        )


def _description(model: CLIP) -> dict[str, Any]:
    """What a program needs beside the graphs."""
    bias = {} if model.logit_bias is None else {"logit_bias": model.logit_bias.item()}
    return {
        "image_size": model.visual.image_size,
        "context_length": model.text.context_length,
        "embed_dim": model.config.embed_dim,
        "logit_scale": model.logit_scale.item(),  # the log of the factor
        **bias,
    }
