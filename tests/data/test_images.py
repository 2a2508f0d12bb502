import csv
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageCms, ImageOps

from pennyclip.data import images
from pennyclip.data.hashes import phash, pixel_hash
from pennyclip.data.images import ImageError, decode
from pennyclip.data.resize import resize_short_side


def photo(height: int = 90, width: int = 120, seed: int = 0) -> np.ndarray:
    """A smooth picture with an orientation: no two of its eight turns are alike."""
    y, x = np.mgrid[0:height, 0:width]
    phase = np.random.default_rng(seed).uniform(0, 6, 3)
    waves = [np.sin(x / 9 + p) * 60 + y * 90 / height + 90 for p in phase]
    return np.stack(waves, axis=-1).clip(0, 255).astype(np.uint8)


def save(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_16_bit(values: np.ndarray) -> bytes:
    """A PNG of 16-bit samples, gray [H, W] or RGB [H, W, 3]; Pillow writes only the gray ones."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    color = 0 if values.ndim == 2 else 2
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, color, 0, 0, 0)
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_every_awkward_file_has_the_verdict_of_its_manifest(shared: Path) -> None:
    folder = shared / "data" / "nasty"
    with (folder / "manifest.csv").open(encoding="utf-8", newline="") as file:
        verdicts = {row["file"]: row["should_decode"] for row in csv.DictReader(file)}
    assert len(verdicts) == 40
    for name, verdict in verdicts.items():
        try:
            pixels = decode((folder / name).read_bytes()).pixels
            decoded = "yes"
            assert pixels.dtype == np.uint8
            assert pixels.shape[2] == 3
        except ImageError:
            decoded = "no"
        assert verdict in (decoded, "optional"), name


def test_the_camera_s_orientation_is_applied(shared: Path) -> None:
    data = (shared / "data" / "nasty" / "exif_rot6_landscape.jpg").read_bytes()
    decoded = decode(data)
    assert decoded.pixels.shape == (1200, 1800, 3)
    assert decoded.reencode
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.abs(decoded.pixels.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_orientations_come_out_upright(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = save(Image.fromarray(photo()), kind, exif=exif, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    pixels = decode(data).pixels
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= 2


def test_hidden_colours_under_full_transparency_become_white() -> None:
    for hidden in [(0, 0, 0), (240, 30, 10)]:
        data = save(Image.new("RGBA", (8, 8), (*hidden, 0)), "PNG")
        assert (decode(data).pixels == 255).all()


def test_half_transparency_is_half_white() -> None:
    data = save(Image.new("RGBA", (4, 4), (0, 100, 200, 128)), "PNG")
    assert np.abs(decode(data).pixels[0, 0].astype(int) - (127, 177, 227)).max() <= 1


@pytest.mark.parametrize("mode", ["P", "LA", "L"])
def test_transparency_of_other_modes(mode: str) -> None:
    if mode == "LA":
        data = save(Image.new("LA", (4, 4), (10, 0)), "PNG")
    else:
        data = save(Image.new(mode, (4, 4), 0), "PNG", transparency=0)
    assert (decode(data).pixels == 255).all()


def test_16_bit_samples_are_scaled_not_clipped() -> None:
    values = np.array([[0, 257, 1000, 32768, 65535]], np.uint16)
    expected = np.round(values / 257).astype(int)  # 65535 / 255
    gray = decode(png_16_bit(values)).pixels
    assert (gray[..., 0] == expected).all()
    assert (gray == gray[..., :1]).all()
    tiff = save(Image.fromarray(values), "TIFF")
    assert (decode(tiff).pixels[..., 0] == expected).all()
    colour = decode(png_16_bit(np.stack([values, values // 2, values // 4], axis=-1))).pixels
    for channel, part in enumerate([values, values // 2, values // 4]):
        assert np.abs(colour[..., channel] - part / 257).max() <= 1


def test_samples_without_a_defined_white_are_refused() -> None:
    data = save(Image.fromarray(np.full((4, 4), 0.5, np.float32)), "TIFF")
    with pytest.raises(ImageError, match="unclear samples"):
        decode(data)


def test_cmyk_palette_gray_and_the_first_frame() -> None:
    red = Image.new("RGB", (16, 16), (200, 30, 40))
    for data in (
        save(red.convert("CMYK"), "JPEG", quality=100),
        save(red.quantize(4), "PNG"),
        save(red, "GIF", save_all=True, append_images=[Image.new("RGB", (16, 16), "blue")]),
        save(red, "WEBP", save_all=True, append_images=[Image.new("RGB", (16, 16), "blue")]),
    ):
        pixels = decode(data).pixels
        assert np.abs(pixels[8, 8].astype(int) - (200, 30, 40)).max() <= 12
    gray = decode(save(Image.new("L", (16, 16), 77), "JPEG"))
    assert (np.abs(gray.pixels.astype(int) - 77) <= 1).all()
    assert not gray.reencode


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGB", {}),
        ("GIF", "P", {}),
        ("WEBP", "RGB", {}),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}),
        ("BMP", "RGB", {}),
    ],
)
def test_a_file_cut_anywhere_is_refused(kind: str, mode: str, options: dict[str, object]) -> None:
    data = save(Image.fromarray(photo()).convert(mode), kind, **options)
    decode(data)
    for share in (0.1, 0.5, 0.8, 0.95):
        with pytest.raises(ImageError):
            decode(data[: int(len(data) * share)])


def test_stray_bytes_between_segments_do_not_cost_the_picture() -> None:
    data = save(Image.fromarray(photo()), "JPEG")
    odd = data[:20] + b"\x11\x22\x33" + data[20:]  # between the JFIF header and the next segment
    with pytest.raises(ValueError, match="extraneous"):
        images.decode_jpeg(odd)
    decoded = decode(odd)
    assert decoded.reencode
    assert np.abs(decoded.pixels.astype(int) - decode(data).pixels).max() <= 2


def test_a_file_that_ends_in_its_header_is_damaged() -> None:
    for kind, length in (("PNG", 33), ("GIF", 8), ("JPEG", 4)):
        with pytest.raises(ImageError, match=f"damaged: it begins as {kind}, but its header"):
            decode(save(Image.fromarray(photo()), kind)[:length])


def test_a_bomb_is_refused_by_its_header() -> None:
    side = 10_001
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 0, 0, 0, 54, 40, side, side, 1, 24, *[0] * 6)
    with pytest.raises(ImageError, match="too large: 10001 x 10001"):
        decode(header)


def test_reasons_name_what_was_found() -> None:
    with pytest.raises(ImageError, match="empty file: 0 bytes"):
        decode(b"")
    with pytest.raises(ImageError, match="not a picture: starts with b'<!DOCTYPE html>"):
        decode(b"<!DOCTYPE html><p>404")
    with pytest.raises(ImageError, match="not a picture"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


@pytest.mark.parametrize("size", [(400, 300), (301, 700), (257, 256), (1024, 999)])
def test_resize_equals_pillow_s_bicubic(size: tuple[int, int]) -> None:
    pixels = photo(*size)
    resized = resize_short_side(pixels, 256)
    assert min(resized.shape[:2]) == 256
    expected = Image.fromarray(pixels).resize(
        (resized.shape[1], resized.shape[0]), Image.Resampling.BICUBIC
    )
    assert resized.shape[0] / resized.shape[1] == pytest.approx(size[0] / size[1], rel=0.005)
    assert np.abs(resized.astype(float) - np.asarray(expected)).mean() < 0.01


def test_nothing_is_enlarged() -> None:
    pixels = photo(100, 50)
    assert resize_short_side(pixels, 256) is pixels


@pytest.mark.parametrize("progressive", [False, True])
def test_metadata_goes_and_the_picture_stays_bit_equal(progressive: bool) -> None:
    exif = Image.Exif()
    exif[0x010F] = "SecretMaker"
    exif.get_ifd(0x8825)[1] = "N"  # GPS latitude reference
    exif.get_ifd(0x8825)[2] = (52.0, 31.0, 12.0)
    jpeg = save(
        Image.fromarray(photo()),
        "JPEG",
        exif=exif,
        comment=b"SecretComment",
        xmp=b"<x:xmpmeta>SecretXmp</x:xmpmeta>",
        icc_profile=b"SecretProfile" * 20,
        progressive=progressive,
    )
    stripped = images.strip_metadata(jpeg + b"SecretTrailer")
    assert b"Secret" not in stripped
    assert not Image.open(io.BytesIO(stripped)).getexif()
    assert (images.decode_jpeg(stripped) == images.decode_jpeg(jpeg)).all()
    assert len(stripped) < len(jpeg)
    assert images.strip_metadata(stripped) == stripped


def test_adobe_s_colour_transform_survives() -> None:
    """Without its Adobe segment an RGB JPEG would be read as YCbCr."""
    jpeg = simplejpeg.encode_jpeg(photo(), colorspace="RGB")
    rgb = save(Image.fromarray(photo()), "JPEG", keep_rgb=True)
    for data in (jpeg, rgb):
        assert (images.decode_jpeg(images.strip_metadata(data)) == decode(data).pixels).all()
    assert np.abs(decode(rgb).pixels.astype(int) - photo()).mean() < 5


def test_jpeg_round_trip_is_close() -> None:
    pixels = np.repeat(photo()[..., :1], 3, axis=2)
    back = images.decode_jpeg(images.encode_jpeg(pixels, 90))
    assert np.abs(back.astype(int) - pixels).mean() < 2


def test_pixel_hash_knows_shape_and_pixels() -> None:
    pixels = photo(40, 60)
    assert pixel_hash(pixels) == pixel_hash(pixels.copy())
    assert pixel_hash(pixels) != pixel_hash(pixels.reshape(60, 40, 3))
    changed = pixels.copy()
    changed[3, 5, 1] ^= 1
    assert pixel_hash(pixels) != pixel_hash(changed)


def test_phash_is_near_for_a_resave_and_far_for_another_picture(shared: Path) -> None:
    folder = shared / "data" / "openstax-pairs" / "images"
    some = [decode(path.read_bytes()).pixels for path in sorted(folder.iterdir())[:60:6]]
    hashes = [phash(pixels) for pixels in some]
    for pixels, own in zip(some, hashes, strict=True):
        smaller = resize_short_side(pixels, 128)
        resaved = images.decode_jpeg(images.encode_jpeg(smaller, 60))
        assert (phash(resaved) ^ own).bit_count() <= 8
    distances = [(a ^ b).bit_count() for i, a in enumerate(hashes) for b in hashes[:i]]
    assert min(distances) > 8


# --- colours


def s15(values: tuple[float, ...]) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def icc_profile(space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    """An ICC profile, version 2.1 (ICC.1:2001-04): header, table of tags, tags."""
    white = (0.9642, 1.0, 0.8249)  # D50
    tags = {b"desc": b"desc\0\0\0\0\0\0\0\5test\0" + bytes(78), **tags}
    tags[b"wtpt"] = b"XYZ \0\0\0\0" + s15(white)
    table, body, start = b"", b"", 132 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    header = struct.pack(">I", start + len(body)) + bytes(4) + b"\x02\x10\0\0"
    header += (b"prtr" if space == b"CMYK" else b"mntr") + space + connection + bytes(12) + b"acsp"
    header += bytes(28) + s15(white)
    return header.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def display_p3(gamma: float = 2.2) -> bytes:
    """Display P3's primaries, adapted to D50, with a plain gamma."""
    primaries = {
        b"r": (0.5151, 0.2412, -0.0011),
        b"g": (0.2920, 0.6922, 0.0419),
        b"b": (0.1571, 0.0666, 0.7841),
    }
    tags = {}
    for name, values in primaries.items():
        tags[name + b"XYZ"] = b"XYZ \0\0\0\0" + s15(values)
        tags[name + b"TRC"] = b"curv\0\0\0\0\0\0\0\1" + struct.pack(">H", round(gamma * 256))
    return icc_profile(b"RGB ", b"XYZ ", tags)


def printer() -> bytes:
    """A CMYK profile: paper is white, whatever has black in it is black, all else middle gray."""
    ramp = bytes(range(256))
    light = [255 if corner == 0 else 0 if corner % 2 else 128 for corner in range(16)]
    lab = b"".join(bytes([value, 128, 128]) for value in light)  # black is the last of the inks
    head = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + s15((1, 0, 0, 0, 1, 0, 0, 0, 1))
    return icc_profile(b"CMYK", b"Lab ", {b"A2B0": head + ramp * 4 + lab + ramp * 3})


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_wide_colours_become_srgb(kind: str) -> None:
    """Display P3's (200, 100, 50) lies outside of nothing, and is (216, 93, 24) in sRGB, as
    littlecms has it (Pillow's ImageCms, by hand)."""
    options = {"quality": 100} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    flat = Image.new("RGB", (16, 16), (200, 100, 50))
    decoded = decode(save(flat, kind, icc_profile=display_p3(), **options))
    assert decoded.reencode
    assert decoded.profile is not None
    converted = images.to_srgb(decoded.pixels, decoded.profile)
    assert np.abs(converted[8, 8].astype(int) - (216, 93, 24)).max() <= 2
    whole = images.from_pil(Image.open(io.BytesIO(save(flat, kind, icc_profile=display_p3()))))
    assert np.abs(whole[8, 8].astype(int) - (216, 93, 24)).max() <= 6


def test_srgb_and_broken_profiles_change_nothing() -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (srgb, b"not a profile", display_p3()[:200], printer()):
        decoded = decode(save(Image.fromarray(photo()), "JPEG", icc_profile=profile))
        assert decoded.profile is None
        assert not decoded.reencode
        assert images.to_srgb(decoded.pixels, decoded.profile) is decoded.pixels


def gray_profile(gamma: float) -> bytes:
    curve = b"curv\0\0\0\0\0\0\0\1" + struct.pack(">H", round(gamma * 256))
    return icc_profile(b"GRAY", b"XYZ ", {b"kTRC": curve})


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "16-bit PNG", "LA"])
def test_gray_of_another_gamma_becomes_srgb(kind: str) -> None:
    """Gamma 1.8's 96 is light of (96 / 255) ** 1.8 = 0.172, which sRGB writes as 115."""
    light = (96 / 255) ** 1.8
    expected = 255 * (1.055 * light ** (1 / 2.4) - 0.055)
    assert round(expected) == 115
    gray = Image.new("L", (16, 16), 96)
    if kind == "16-bit PNG":
        gray = Image.fromarray(np.full((16, 16), 96 * 257, np.uint16))
    elif kind == "LA":
        gray.putalpha(255)
    file_kind = "PNG" if kind in ("16-bit PNG", "LA") else kind
    data = save(gray, file_kind, icc_profile=gray_profile(1.8))
    decoded = decode(data)
    assert decoded.reencode
    assert decoded.profile is not None
    converted = images.to_srgb(decoded.pixels, decoded.profile)
    assert converted.shape == (16, 16, 3)
    assert np.abs(converted[8, 8] - expected).max() <= 2
    assert np.abs(images.from_pil(Image.open(io.BytesIO(data)))[8, 8] - expected).max() <= 2


def test_gray_profiles_of_colour_pictures_and_the_other_way_round_change_nothing() -> None:
    colour = Image.fromarray(photo())
    for image, profile in ((colour, gray_profile(1.8)), (colour.convert("L"), display_p3())):
        decoded = decode(save(image, "JPEG", icc_profile=profile))
        assert decoded.profile is None
        assert not decoded.reencode


def test_cmyk_goes_through_its_own_profile() -> None:
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    plain = decode(save(cyan, "TIFF")).pixels[8, 8]
    assert np.abs(plain.astype(int) - (0, 255, 255)).max() <= 2
    for kind in ("TIFF", "JPEG"):
        gray = decode(save(cyan, kind, icc_profile=printer())).pixels[8, 8]
        assert np.abs(gray.astype(int) - 119).max() <= 6  # L* = 50
        bare = decode(save(Image.new("CMYK", (16, 16)), kind, icc_profile=printer())).pixels[8, 8]
        assert (bare >= 250).all()


def test_lab_is_converted() -> None:
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    to_lab = ImageCms.buildTransform(srgb, lab, "RGB", "LAB")
    red = ImageCms.applyTransform(Image.new("RGB", (16, 16), (200, 30, 40)), to_lab)
    assert red is not None
    pixels = decode(save(red, "TIFF")).pixels
    assert np.abs(pixels[8, 8].astype(int) - (200, 30, 40)).max() <= 4


def test_more_pixels_are_let_in_where_asked_for() -> None:
    data = save(Image.fromarray(photo()), "PNG")
    assert decode(data, max_pixels=90 * 120).pixels.shape == (90, 120, 3)
    with pytest.raises(ImageError, match="more than 10,799 pixels"):
        decode(data, max_pixels=90 * 120 - 1)
