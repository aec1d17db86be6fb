from guidance import assistant, gen, models, user
from guidance import json as json_of
from pydantic import BaseModel
from shared import PLAIN_URL, SAID, SAY, URL


class City(BaseModel):
    city: str


model = models.OpenAI("fake", base_url=f"{URL}/v1", api_key="any", echo=False)
with user():
    said = model + SAY
with assistant():
    said += gen("said")
assert said["said"] == SAID
plain = models.OpenAI("my-model", base_url=f"{PLAIN_URL}/v1", api_key="any", echo=False)
with user():
    plain += "Name a city."
with assistant():
    plain += json_of("city", schema=City, max_tokens=64)
assert City.model_validate_json(plain["city"]).city
