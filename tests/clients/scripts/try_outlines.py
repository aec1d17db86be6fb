import openai
import outlines
from pydantic import BaseModel
from shared import PLAIN_URL, SAID, SAY, URL


class City(BaseModel):
    city: str


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
assert outlines.from_openai(client, "fake")(SAY) == SAID
plain = openai.OpenAI(base_url=f"{PLAIN_URL}/v1", api_key="any")
for make in (outlines.from_openai, outlines.from_vllm):
    model = make(plain, "my-model")
    assert City.model_validate_json(model("Rome", City, max_tokens=64)).city, make
from outlines.types import Choice, Regex  # noqa: E402

model = outlines.from_vllm(plain, "my-model")
assert model("Pick one:", Choice(["red", "blue"])) in ("red", "blue")
assert len(model("A number:", Regex("[0-9]{3}"))) == 3
