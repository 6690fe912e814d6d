"""A small model that sees images (see tiny_models). Needs Pillow, not torchvision."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path

from lmcache.testing.tiny_models import common_settings, save_model

IMAGE_PIXELS = 112
_PATCH_PIXELS = 14
_PATCHES_PER_TOKEN_AND_SIDE = 2
_SEEN_TOKENS = (IMAGE_PIXELS // _PATCH_PIXELS // _PATCHES_PER_TOKEN_AND_SIDE) ** 2
IMAGE_TOKENS = _SEEN_TOKENS + 3  # with two brackets and a label
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endfor %}"
)


def make_idefics3(folder: Path, *, seed: int = 0) -> Path:
    """An Idefics 3 of two layers with a SigLIP of two: an image stands for 19 tokens. With a chat template."""
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    settings = common_settings()
    text = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        **settings,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_PIXELS,
        "patch_size": _PATCH_PIXELS,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=_PATCHES_PER_TOKEN_AND_SIDE,
        pad_token_id=settings["pad_token_id"],
        dtype=settings["dtype"],
    )
    save_model(folder, lambda: Idefics3ForConditionalGeneration(config), seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<global-img>"]})
    size = {"longest_edge": IMAGE_PIXELS}
    Idefics3Processor(
        Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False),
        tokenizer,
        image_seq_len=_SEEN_TOKENS,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    saved = Idefics3Config.from_pretrained(folder)
    saved.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    saved.save_pretrained(folder)
    return folder


def image_url(seed: int) -> str:
    """Each patch in another strong colour, as a `data:` URL of a PNG. (Noise averages out.)"""
    from PIL import Image

    side = IMAGE_PIXELS // _PATCH_PIXELS
    pixels = bytes(random.Random(seed).choices((0, 255), k=3 * side * side))
    image = Image.frombytes("RGB", (side, side), pixels).resize((IMAGE_PIXELS, IMAGE_PIXELS), Image.Resampling.NEAREST)
    packed = io.BytesIO()
    image.save(packed, "PNG")
    return "data:image/png;base64," + base64.b64encode(packed.getvalue()).decode()
