import openai
from pydantic import BaseModel
from shared import CALL, CITY, OBJECT, PLAIN_URL, SAID, SAY, URL, user


class City(BaseModel):
    city: str


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0)
plain = openai.OpenAI(base_url=f"{PLAIN_URL}/v1", api_key="any", max_retries=0)
chat = client.chat.completions
assert chat.create(model="fake", messages=user(SAY)).choices[0].message.content == SAID
with chat.stream(model="fake", messages=user(SAY)) as stream:
    assert stream.get_final_completion().choices[0].message.content == SAID
tool = openai.pydantic_function_tool(City, name="weather")
call = chat.create(model="fake", messages=user(CALL), tools=[tool]).choices[0].message.tool_calls[0]
assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
parsed = chat.parse(model="fake", messages=user(OBJECT), response_format=City)
assert parsed.choices[0].message.parsed.city == CITY
assert client.responses.parse(model="fake", input=OBJECT, text_format=City).output_parsed.city == CITY
first = client.responses.create(model="fake", input=SAY)
assert client.responses.create(model="fake", input=SAY, previous_response_id=first.id).output_text == SAID
assert (
    plain.chat.completions.create(model="my-model", messages=user("Hi"), max_tokens=8).usage.total_tokens > 8
)
real = plain.chat.completions.parse(
    model="my-model", messages=user("Rome"), response_format=City, max_tokens=64
)
assert real.choices[0].message.parsed.city
assert len(plain.embeddings.create(model="my-model", input=["a", "b"]).data) == 2
assert [model.id for model in client.models.list()] == ["fake"]
for options, kind in (
    ({"model": "nobody", "messages": user("x")}, openai.NotFoundError),
    ({"model": "my-model", "messages": user("word " * 9000)}, openai.BadRequestError),
):
    try:
        plain.chat.completions.create(**options)
    except kind as error:
        assert "is not served here" in error.message or "maximum context length is 8192" in error.message
    else:
        raise AssertionError(kind)
