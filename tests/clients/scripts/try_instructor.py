import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel
from shared import CITY, OBJECT, PLAIN_URL, URL, user


class City(BaseModel):
    city: str


BY_TOOL = 'CALL {"name": "City", "arguments": {"city": "Rome"}} END'
openai = OpenAI(base_url=f"{URL}/v1", api_key="any")
for mode, text in (
    (instructor.Mode.TOOLS, BY_TOOL),
    (instructor.Mode.JSON, OBJECT),
    (instructor.Mode.JSON_SCHEMA, OBJECT),
    (instructor.Mode.RESPONSES_TOOLS, BY_TOOL),
):
    client = instructor.from_openai(openai, mode=mode)
    answer = client.chat.completions.create(
        model="fake", messages=user(text), response_model=City, max_retries=0
    )
    assert answer.city == CITY, mode
claude = instructor.from_anthropic(Anthropic(base_url=URL, api_key="any"))
answer = claude.messages.create(
    model="fake", max_tokens=200, messages=user(BY_TOOL), response_model=City, max_retries=0
)
assert answer.city == CITY
plain = instructor.from_openai(
    OpenAI(base_url=f"{PLAIN_URL}/v1", api_key="any"), mode=instructor.Mode.JSON_SCHEMA
)
assert plain.chat.completions.create(
    model="my-model", messages=user("Rome"), response_model=City, max_tokens=64
).city
