"""From the bytes of any picture file to upright RGB pixels, strictly, and back to JPEG.

A picture is decoded once, in full: that finds every damaged file, where a look at the header
(or Pillow's `verify`) finds none. What comes out is what a person would see: upright, on white
where it is transparent, the first frame of an animation, in sRGB whatever colours it came in.
"""

import io
import re
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageCms, UnidentifiedImageError

U8 = npt.NDArray[np.uint8]

MAX_SIDE = 65_500
"""Longest side that JPEG libraries write (libjpeg's JPEG_MAX_DIMENSION)."""

MAX_PIXELS = 100_000_000
"""Pictures with more pixels are refused by their header. Chosen: 300 MB as RGB, and above any
camera in common use; Pillow itself refuses from 179 million."""

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM")
"""Pillow's readers that may see a stranger's bytes (its EPS reader, say, starts Ghostscript)."""

MAGIC = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "GIF": re.compile(rb"GIF8[79]a"),
}
"""How files of the common formats begin: one that is refused all the same is damaged."""

_JPEG_DAMAGE = re.compile("premature end|bad huffman|bad arithmetic|instead of rst", re.I)
"""libjpeg's warnings that mean lost pixels; its others (stray bytes between segments, unknown
revision numbers) leave the picture whole."""


ROUNDING = 2
"""Of 255: what a profile may change at most to count as sRGB. Chosen: what its tables round."""


Mode = Literal["RGB", "L", "CMYK"]
"""Pillow's names of colours that a profile may be of."""


class ImageError(ValueError):
    """This input is no usable picture. The message is `kind: detail`; kinds are counted."""


@dataclass(frozen=True)
class Decoded:
    """A decoded picture."""

    pixels: U8
    """[H, W, 3] RGB, upright."""
    reencode: bool
    """False for an upright JPEG, sRGB or gray as sRGB has it, whose own data can be kept."""
    profile: bytes | None = None
    """The ICC profile of the pixels where it is not sRGB; see `to_srgb`. Converting is for later,
    when they are fewer."""


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Decoded:
    """Decode a picture in full.

    Args:
        data: the file.
        max_pixels: pictures with more are refused by their header.

    Raises:
        ImageError: empty, not a picture, too large, damaged, or samples without a defined white.
    """
    if not data:
        raise ImageError("empty file: 0 bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata, mostly; what matters raises
        try:
            return _decode(data, max_pixels)
        except (ImageError, MemoryError):
            raise
        except Image.DecompressionBombError:
            raise ImageError(f"too large: more than {max_pixels:,} pixels") from None
        except UnidentifiedImageError:
            kind = next((name for name, magic in MAGIC.items() if magic.match(data)), None)
            raise ImageError(
                f"not a picture: starts with {data[:16]!r}; readable are {', '.join(FORMATS)}"
                if kind is None
                else f"damaged: it begins as {kind}, but its header can't be read"
            ) from None
        except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
            raise ImageError(f"damaged: {error or type(error).__name__}") from None


def _decode(data: bytes, max_pixels: int) -> Decoded:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if max(image.size) > MAX_SIDE:
            raise ImageError(
                f"too large: {image.width} x {image.height}, and a side has at most {MAX_SIDE:,}"
            )
        if image.width * image.height > max_pixels:
            raise ImageError(
                f"too large: {image.width} x {image.height}, more than {max_pixels:,} pixels"
            )
        if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
            try:
                pixels = decode_jpeg(data)
            except ValueError as error:
                if _JPEG_DAMAGE.search(str(error)):
                    raise
                # unusual but whole: Pillow reads it, and it is encoded anew
            else:
                orientation, profile = _orientation(image), _profile(image)
                reencode = orientation != 1 or profile is not None
                return Decoded(_upright(pixels, orientation), reencode, profile)
        return Decoded(_load(image), True, _profile(image))


def from_pil(image: Image.Image) -> U8:
    """[H, W, 3] sRGB pixels of an open picture, upright, on white where it is transparent."""
    pixels = _load(image)
    return to_srgb(pixels, _profile(image))


def _load(image: Image.Image) -> U8:
    image.load()
    # The orientation is read after loading: some of Pillow's readers turn the picture themselves
    # while loading, and a PNG may carry its EXIF behind the pixels.
    return _upright(_to_rgb(image), _orientation(image))


def decode_jpeg(data: bytes) -> U8:
    """[H, W, 3] RGB pixels of an RGB or gray JPEG as stored, whatever its EXIF says.

    Raises:
        ValueError: not a JPEG, or a damaged one.
    """
    return simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # broken EXIF says nothing about the pixels; parsing it raises anything
        return 1


def _upright(pixels: U8, orientation: int) -> U8:
    """Undo an EXIF orientation (Exif 2.32, tag 0x0112: which corner the first pixel shows)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _profile(image: Image.Image) -> bytes | None:
    """The picture's ICC profile where its colours are RGB or gray, but not sRGB's."""
    profile = image.info.get("icc_profile")
    if not isinstance(profile, bytes):
        return None
    if image.mode in ("RGB", "RGBA", "P", "PA", "RGBX"):
        return profile if _transform(profile, "RGB") is not None else None
    if image.mode in ("L", "LA") or image.mode.startswith("I;16"):
        return profile if _transform(profile, "L") is not None else None
    return None


@lru_cache(maxsize=64)  # chosen: a source's pictures come from a few cameras and programs
def _transform(profile: bytes, mode: Mode) -> ImageCms.ImageCmsTransform | None:
    """To sRGB; None where nothing would change, or the profile is of no use, or of other colours
    than the mode's."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
        if mode == "CMYK":
            return transform
        steps = np.linspace(0, 255, 9, dtype=np.uint8)
        cube = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(27, 27, 3)
        if mode == "L":
            cube = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, 2)
        changed = _converted(cube, transform)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None
    return transform if np.abs(changed.astype(int) - cube).max() > ROUNDING else None


def _converted(pixels: U8, transform: ImageCms.ImageCmsTransform) -> U8:
    """[H, W, 3] RGB of [H, W, 3] RGB, or of gray in three equal channels."""
    gray = transform.input_mode == "L"
    image = Image.fromarray(np.ascontiguousarray(pixels[..., 0]) if gray else pixels)
    return np.asarray(ImageCms.applyTransform(image, transform))


def to_srgb(pixels: U8, profile: bytes | None) -> U8:
    """[H, W, 3] pixels of a `Decoded` picture in sRGB."""
    if profile is None:
        return pixels
    # A profile is of one kind of colours, so for one of these two at most.
    transform = _transform(profile, "RGB") or _transform(profile, "L")
    return pixels if transform is None else _converted(pixels, transform)


def _to_rgb(image: Image.Image) -> U8:
    """[H, W, 3] of a loaded picture in any of Pillow's modes; transparency becomes white."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return _from_wide_gray(image)
    if image.mode == "CMYK" and isinstance(image.info.get("icc_profile"), bytes):
        transform = _transform(image.info["icc_profile"], "CMYK")
        if transform is not None:
            return np.array(ImageCms.applyTransform(image, transform))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return np.array(image.convert("RGB"))


def _from_wide_gray(image: Image.Image) -> U8:
    """Gray samples of more than 8 bits, scaled so that white stays white."""
    bits = 16
    if image.format == "TIFF":
        bits = int(image.tag_v2.get(258, (1,))[0])  # type: ignore[attr-defined]  # BitsPerSample
    if bits > 16 or (image.mode in ("I", "F") and image.format != "PPM"):
        raise ImageError(f"unclear samples: {image.format} mode {image.mode} defines no white")
    values = np.asarray(image).astype(np.uint32)
    white = (1 << bits) - 1
    gray = ((values * 255 + white // 2) // white).astype(np.uint8)
    if image.info.get("transparency") is not None:  # the one value that a PNG calls transparent
        gray[values == image.info["transparency"]] = 255
    return np.repeat(gray[..., None], 3, axis=2)


def encode_jpeg(pixels: U8, quality: int = 90) -> bytes:
    """JPEG with halved colour resolution (4:2:0, as cameras and Pillow write it)."""
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling="420"
    )


_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])", re.S)
"""The next marker behind entropy-coded data, where FF 00 and the restarts FF D0-D7 are data."""


def strip_metadata(jpeg: bytes) -> bytes:
    """The same JPEG with its picture data untouched and everything about it left out.

    EXIF (with the camera's position), XMP, colour profile, comments, thumbnails and whatever
    stands behind the end of the picture go; JFIF's header and Adobe's colour transform, which
    decoding needs, stay. Segments: ITU T.81, annex B.
    """
    kept = [b"\xff\xd8"]
    position, in_scan = 2, False
    while (found := _MARKER.search(jpeg, position)) is not None:
        code, start = found[1][0], found.end()
        if in_scan:
            kept.append(jpeg[position : found.start()])
        if code == 0xD9:
            return b"".join([*kept, b"\xff\xd9"])
        end = start + int.from_bytes(jpeg[start : start + 2], "big")
        payload = jpeg[start + 2 : end]
        if code == 0xE0 and payload.startswith(b"JFIF\0") and len(payload) >= 14:
            payload = payload[:12] + b"\0\0"  # a thumbnail 0 wide and 0 high
            keep = True
        elif code == 0xEE:
            keep = payload.startswith(b"Adobe")
        else:
            keep = not (0xE0 <= code <= 0xEF or code == 0xFE)
        if keep:
            length = (len(payload) + 2).to_bytes(2, "big")
            kept.append(bytes([0xFF, code]) + length + payload)
        position, in_scan = end, code == 0xDA
    raise ImageError("damaged: no end of image marker")
