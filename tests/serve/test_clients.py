"""The clients that people use: OpenAI's, synchronous and not, and LangChain's."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import openai
import pytest

from support.paths import ROOT
from vlmfast.media import load_video

CLIP = ROOT / "examples" / "clip.mp4"


@pytest.fixture
def messages(served: Any) -> list[Any]:
    found = served.body("Describe it.", 3)["messages"]
    found[0]["content"][0]["image_url"]["detail"] = "high"
    return found


def test_plain_and_streamed(client: openai.OpenAI, messages: list[Any]) -> None:
    plain = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    text = plain.choices[0].message.content
    assert text and plain.choices[0].finish_reason == "stop"
    usage = plain.usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert usage.vlmfast["visual_tokens_in"] > usage.vlmfast["visual_tokens_kept"]["scope"] > 0
    more = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"model": "tiny", "messages": messages, "temperature": 0, **more}
    chunks = list(client.chat.completions.create(**asked))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == text and sum(map(bool, pieces)) > 2
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens


def test_asynchronous_clients_together(served: Any, messages: list[Any]) -> None:
    """One leaves its ``async with`` in mid-stream; the answers of the others are complete."""

    async def ask(client: openai.AsyncOpenAI, most: int = 0) -> str:
        """Streamed, up to ``most`` characters, or not."""
        found = await client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, stream=bool(most)
        )
        if not most:
            return found.choices[0].message.content
        text = ""
        async with found:
            async for chunk in found:
                text += chunk.choices[0].delta.content or ""
                if len(text) >= most:
                    break
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            return await asyncio.gather(*(ask(client, n) for n in (1, 0, 10**6, 0, 10**6)))

    before = served.metric("request_errors_total", status="499")
    some, *whole = asyncio.run(all_of_them())
    assert len(set(whole)) == 1
    assert some and whole[0].startswith(some) and len(some) < len(whole[0])
    served.until(lambda: served.metric("request_errors_total", status="499") == before + 1)
    served.until(lambda: served.vlm.engine.load().decoding == 0)


def test_video(served: Any, client: openai.OpenAI) -> None:
    data = CLIP.read_bytes()
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    question = "Which way does the cyan star move?"
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": question}]
    found = client.chat.completions.create(
        model="full",
        messages=[{"role": "user", "content": content}],
        extra_body={"num_frames": 4, "trace": True},
    )
    trace = found.usage.vlmfast["trace"]
    assert trace["items"] == [{"video": 0, "frame": n, "frames": 4} for n in range(4)]
    assert {token["item"] for token in trace["tokens"]} == set(range(4))
    frames = load_video(data, num_frames=4).frames
    expected = served.vlm.ask(question, video=frames)
    assert found.choices[0].message.content == expected.text
    assert found.usage.vlmfast["visual_tokens_in"] == expected.stats.visual_tokens_in
    own = {"num_frames": 2, "recipe": "hired:0.1"}
    one = client.chat.completions.create(
        model="full", messages=[{"role": "user", "content": content}], extra_body=own
    )
    assert one.usage.vlmfast["recipe"] == "hired:0.1"
    assert one.usage.prompt_tokens < found.usage.prompt_tokens  # the control


def test_errors_have_their_classes(client: openai.OpenAI, messages: list[Any]) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-4o", messages=messages)
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", messages=messages, temperature=7)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        create(model="tiny", messages=messages, tools=[{"type": "function", "function": {}}])


def test_responses(served: Any, client: openai.OpenAI, messages: list[Any]) -> None:
    image = {"type": "input_image", "image_url": served.image_url(3), "detail": "auto"}
    text = {"type": "input_text", "text": "Describe it."}
    given = [{"role": "user", "content": [image, text]}]
    plain = client.responses.create(model="tiny", input=given, temperature=0)
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert plain.output_text == chat.choices[0].message.content
    assert plain.status == "completed" and plain.usage.input_tokens == chat.usage.prompt_tokens
    with client.responses.stream(model="tiny", input=given, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == plain.output_text
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == plain.output_text and len(deltas) > 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    cut = client.responses.create(model="tiny", input=given, max_output_tokens=2, temperature=0)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_langchain(served: Any, messages: list[Any], client: openai.OpenAI) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        model="tiny", base_url=f"{served.url}/v1", api_key="unused", temperature=0, max_retries=0
    )
    expected = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    text = expected.choices[0].message.content
    found = chat.invoke(messages)
    assert found.content == text
    assert found.usage_metadata["total_tokens"] == expected.usage.total_tokens
    assert "".join(piece.content for piece in chat.stream(messages)) == text
    schema = {"title": "shape", "type": "object", "required": ["shape"]}
    schema |= {"properties": {"shape": {"enum": ["star", "cross"]}}, "additionalProperties": False}
    structured = chat.with_structured_output(schema, method="json_schema")
    assert structured.invoke(messages)["shape"] in ("star", "cross")
