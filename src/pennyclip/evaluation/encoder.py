"""A trained model in use: pictures and texts in, embeddings out."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText, Model
from pennyclip.data.images import from_pil
from pennyclip.data.loader import fit_square
from pennyclip.data.text import ClipTokenizer, JsonTokenizer, Tokenizer, pad, truncate
from pennyclip.model.clip import CLIP
from pennyclip.weights.adopt import adopt, adoptable
from pennyclip.weights.build import build, text_folder
from pennyclip.weights.checkpoint import Checkpoint, choose, load_model
from pennyclip.weights.packages import locate

CHUNK = 32  # inputs encoded at a time. chosen: fits every device, and a CPU's cache


def make_tokenizer(config: Model, folder: Path | None) -> Tokenizer:
    """The tokenizer that belongs to a model's text tower."""
    if isinstance(config.text, ClipText) and config.text.tokenizer is None:
        return ClipTokenizer(config.text.context_length)
    assert folder is not None, "every other tokenizer comes from a folder"
    return JsonTokenizer(folder, config.text.context_length)


@dataclass(frozen=True)
class Encoder:
    """A model with its tokenizer and preprocessing. Embeddings have unit norm and are float32."""

    model: CLIP
    tokenizer: Tokenizer
    checkpoint: Checkpoint

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    @torch.no_grad()
    def encode_image(
        self, images: Sequence[Image.Image] | UInt8[Tensor, "N 3 H W"]
    ) -> Float[Tensor, "N D"]:
        """Embed pictures.

        Args:
            images: PIL images of any size and mode, cut to their centred square; or a uint8
                tensor that already has the model's size.

        Raises:
            TypeError: a single picture, or something that is no PIL image.
            ValueError: the tensor is not uint8 [N, 3, size, size].
        """
        if not isinstance(images, Tensor) and not (
            isinstance(images, Sequence) and all(isinstance(i, Image.Image) for i in images)
        ):
            raise TypeError(
                f"expected a list of PIL images or a uint8 tensor, found {type(images).__name__}; "
                "open files with PIL.Image.open, and write [image] for a single one"
            )
        size = self.model.visual.image_size
        parts = [torch.empty(0, self.model.config.embed_dim)]
        for start in range(0, len(images), CHUNK):
            some = images[start : start + CHUNK]
            if isinstance(some, Tensor):
                if some.dtype != torch.uint8 or some.shape[1:] != (3, size, size):
                    raise ValueError(
                        f"expected uint8 [N, 3, {size}, {size}], found {some.dtype} "
                        f"{list(some.shape)}; pass PIL images to have them resized"
                    )
                batch = some
            else:
                batch = torch.stack([fit_square(from_pil(image), size) for image in some])
            parts.append(F.normalize(self.model.visual(batch.to(self.device)).float(), dim=-1))
        return torch.cat([part.cpu() for part in parts])

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> Float[Tensor, "N D"]:
        """Embed texts; a longer one than the model's context is cut.

        Raises:
            TypeError: a single text instead of a list.
        """
        if isinstance(texts, str):
            raise TypeError("expected a list of texts, found one text; write [text]")
        length = self.model.text.context_length
        parts = [torch.empty(0, self.model.config.embed_dim)]
        for start in range(0, len(texts), CHUNK):
            ids = [truncate(self.tokenizer.encode(t), length) for t in texts[start : start + CHUNK]]
            tokens, lengths = (torch.from_numpy(a).to(self.device) for a in pad(ids, limit=length))
            parts.append(F.normalize(self.model.text(tokens, lengths).float(), dim=-1))
        return torch.cat([part.cpu() for part in parts])


def load(path: str | os.PathLike[str], checkpoint: str = "best") -> Encoder:
    """Load a trained model.

    Args:
        path: a run folder or a checkpoint folder; a folder of open_clip's (with
            open_clip_config.json) or of transformers' (CLIPModel, SiglipModel); `hub:org/name`.
        checkpoint: of a run: `best`, `last` or a step.

    Raises:
        RequestError: there is no such checkpoint, or no such model can be built.
    """
    folder = locate(str(path)) if str(path).startswith("hub:") else Path(path)
    ours = (folder / "meta.json").is_file() or (folder / "checkpoints").is_dir()
    if ours or not adoptable(folder):
        chosen = choose(folder, checkpoint)
        model = load_model(chosen)
        tokenizer = make_tokenizer(model.config, chosen.path)
    else:
        chosen = Checkpoint(folder, step=0, score=None)
        model = _adopted(folder)
        tokenizer = make_tokenizer(model.config, text_folder(model.config))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return Encoder(model, tokenizer, chosen)


def _adopted(folder: Path) -> CLIP:
    """Somebody else's model, in evaluation mode.

    Raises:
        RequestError: its weights leave a part random.
    """
    model, matches = build(adopt(folder), seed=0)
    if new := [name for match in matches for name in match.new]:
        raise RequestError(
            f"the weights in {folder} lack {', '.join(new[:4])}: without them, images and texts "
            "share no space. Expected a whole CLIP."
        )
    return model.eval()
