import anthropic
from pydantic import BaseModel
from shared import CALL, CALLED, CITY, OBJECT, PLAIN_URL, SAID, SAY, URL, user, weather


class City(BaseModel):
    city: str


client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0)
plain = anthropic.Anthropic(base_url=PLAIN_URL, api_key="any", max_retries=0)
ask = {"model": "fake", "max_tokens": 2000}
assert client.messages.create(**ask, messages=user(SAY)).content[-1].text == SAID
thinking = {"type": "enabled", "budget_tokens": 1024}
with client.messages.stream(**ask, messages=user(SAY), thinking=thinking) as stream:
    thought, text = stream.get_final_message().content
assert (thought.thinking, text.text) == ("An order.", SAID)
runner = client.beta.messages.tool_runner(**ask, messages=user(CALL), tools=[anthropic.beta_tool(weather)])
assert runner.until_done().content[-1].text == CALLED
assert client.messages.parse(**ask, messages=user(OBJECT), output_format=City).parsed_output.city == CITY
assert client.messages.count_tokens(model="fake", messages=user(SAY)).input_tokens > 5
(model,) = client.models.list()
assert (model.type, model.id, model.display_name) == ("model", "fake", "fake")
assert client.models.retrieve("fake").created_at.year >= 2020
for name, text, kind in (
    ("nobody", "x", anthropic.NotFoundError),
    ("my-model", "word " * 9000, anthropic.BadRequestError),
):
    try:
        plain.messages.create(model=name, max_tokens=8, messages=user(text))
    except kind as error:
        assert "is not served here" in error.message or "prompt is too long" in error.message
    else:
        raise AssertionError(kind)
