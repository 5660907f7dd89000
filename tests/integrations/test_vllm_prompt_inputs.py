# SPDX-License-Identifier: Apache-2.0
"""Prompts that are more than token ids: media, adapters, embeddings. A handoff is used for its own prompt only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_server import ASK_PREFILL, Server, request

from kvlink.errors import ConfigError
from kvlink.integrations.vllm.model.prompt_inputs import check_media, features_of
from kvlink.integrations.vllm.wire.handoff import prompt_digest

PROMPT = [7, 0, 0, 0, 5, 0, 0, 0, 6, 2]
"""Two images of three placeholders each."""


def image(identifier: str, offset: int = 1, length: int = 3, modality: str = "image") -> Any:
    return SimpleNamespace(
        identifier=identifier, modality=modality, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def adapter(name: str, path: str = "/adapters/v1") -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1)


def asked(*images: Any, lora: Any = None, name: str = "r", params: dict[str, Any] | None = None) -> Any:
    made = request(name, PROMPT, params)
    made.mm_features, made.lora_request = list(images), lora
    return made


def digest(request: Any, num_tokens: int = len(PROMPT)) -> str:
    return prompt_digest(PROMPT[:num_tokens], features_of(request, num_tokens))


ONE = asked(image("a"), image("b", 5))


@pytest.mark.parametrize(
    "other",
    [
        asked(image("a"), image("c", 5)),
        asked(image("b"), image("a", 5)),
        asked(image("a"), image("b", 4)),
        asked(image("a"), image("b", 5, 4)),
        asked(image("a"), image("b", 5, modality="video")),
        asked(image("a")),
        asked(image("a"), image("b", 5), lora=adapter("x")),
    ],
    ids=["another", "swapped", "moved", "longer", "a video", "one less", "an adapter"],
)
def test_other_media_are_another_prompt(other: Any) -> None:
    """Their placeholders are the same token ids."""
    assert digest(other) != digest(ONE)
    assert digest(asked(image("a"), image("b", 5))) == digest(ONE)


def test_media_behind_the_tokens_do_not_count() -> None:
    """Decode may have a longer prompt than prefill had, for example with a second image."""
    assert digest(ONE, 4) == digest(asked(image("a")), 4)
    assert digest(ONE, 6) != digest(asked(image("a")), 6)


def test_names_cannot_be_taken_for_each_other() -> None:
    """A client may choose the name of an image, and another one that of an adapter."""
    assert digest(asked(image("x"))) != digest(asked(lora=adapter("x")))
    assert digest(asked(image('a"]\0["image", 5, 3, "b'))) != digest(ONE)


def test_an_adapter_is_its_content(tmp_path: Path) -> None:
    """Whatever its name and its place. Without files, the path stands for it."""
    for name, content in {"one": b"a", "two": b"b", "copy": b"a"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.bin").write_bytes(content)
    one, two, copy = (
        digest(asked(lora=adapter("x", str(tmp_path / name)))) for name in ("one", "two", "copy")
    )
    assert one == copy != two
    assert digest(asked(lora=adapter("y", str(tmp_path / "one")))) == one
    assert digest(asked(lora=adapter("x"))) == digest(asked(lora=adapter("y")))
    assert digest(asked(lora=adapter("x", "/adapters/v2"))) != digest(asked(lora=adapter("x")))
    assert digest(asked()) != one


@pytest.mark.parametrize(
    ("prefilled", "asks"),
    [
        ({"images": [image("a")]}, {"images": [image("b")]}),
        ({"lora": adapter("x")}, {"lora": adapter("x", "/adapters/v2")}),
        ({"lora": adapter("x")}, {}),
    ],
    ids=["images", "adapters", "no adapter"],
)
def test_decode_refuses_what_was_computed_from_others(prefilled: Any, asks: Any) -> None:
    """A router that mixes up two requests whose tokens are the same."""

    def made(name: str, params: Any, images: Any = (), lora: Any = None) -> Any:
        return asked(*images, lora=lora, name=name, params=params)

    with Server("p") as prefill, Server("d") as decode:
        _, params = prefill.prefill(made("r", ASK_PREFILL, **prefilled), [3, 9, 1])
        decode.load(made("x", params, **asks), [5, 6, 7])
        decode.step_until(lambda: "x" in decode.received)
        assert decode.failed == {"x"}
        assert decode.scheduler.counts == {"another_prompt": 1}
        decode.load(made("y", params, **prefilled), [8, 9, 10])
        decode.step_until(lambda: "y" in decode.received)
        assert decode.failed == {"x"}


@pytest.mark.parametrize("tokens", [None, PROMPT], ids=["all embeddings", "embeddings among tokens"])
def test_embeddings_are_not_handed_off(tokens: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Their tokens are placeholders, the same for other embeddings."""
    embedded = request("r", PROMPT, ASK_PREFILL)
    embedded.prompt_token_ids, embedded.prompt_embeds = tokens, object()
    with Server("p") as prefill:
        assert prefill.prefill(embedded, [3, 9, 1]) == (False, None)
        assert prefill.scheduler.take_counts() == {"embeddings": 1}
        assert len(prefill.scheduler._slots) == 16 - 1
    assert "request r is not handed off: its client sent embeddings" in caplog.text


def test_a_handoff_is_not_used_for_embeddings() -> None:
    with Server("p") as prefill, Server("d") as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        embedded = request("x", PROMPT, params)
        embedded.prompt_embeds = object()
        decode.load(embedded, [5, 6, 7])
        decode.step_until(lambda: "x" in decode.received)
        assert decode.failed == {"x"}


def _with_images(cache_gb: float, prefix_caching: bool) -> Any:
    media = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    return SimpleNamespace(model_config=SimpleNamespace(multimodal_config=media), cache_config=cache)


def test_images_must_be_named_by_their_content() -> None:
    """Without both caches vLLM numbers them, so that the first images of two servers have one name."""
    with pytest.raises(ConfigError, match="give the processor's cache some memory"):
        check_media(_with_images(0, False))
    check_media(_with_images(0, True))
    check_media(_with_images(4, False))
    text_only = _with_images(0, False)
    text_only.model_config.multimodal_config = None
    check_media(text_only)
