import litellm
from pydantic import BaseModel
from shared import CITY, OBJECT, PLAIN_URL, SAID, SAY, URL, user


class City(BaseModel):
    city: str


for model, base in (("openai/fake", f"{URL}/v1"), ("hosted_vllm/fake", f"{URL}/v1"), ("anthropic/fake", URL),
                    ("ollama_chat/fake", URL)):  # fmt: skip
    ask = {"model": model, "api_base": base, "api_key": "any"}
    assert litellm.completion(**ask, messages=user(SAY)).choices[0].message.content == SAID, model
    pieces = litellm.completion(**ask, messages=user(SAY), stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == SAID, model
    answer = litellm.completion(**ask, messages=user(OBJECT), response_format=City)
    assert City.model_validate_json(answer.choices[0].message.content).city == CITY, model
plain = {"api_base": f"{PLAIN_URL}/v1", "api_key": "any"}
assert litellm.embedding(model="openai/my-model", input=["sky"], **plain).data
for model, text, kind in (
    ("openai/nobody", "x", litellm.NotFoundError),
    ("openai/my-model", "word " * 9000, litellm.ContextWindowExceededError),
):
    try:
        litellm.completion(model=model, messages=user(text), **plain)
    except kind:
        continue
    raise AssertionError(kind)
