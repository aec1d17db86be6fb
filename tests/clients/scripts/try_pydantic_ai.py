from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from shared import CALL, CALLED, CITY, OBJECT, SAID, SAY, URL, weather


class City(BaseModel):
    city: str


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
for model in (
    OpenAIChatModel("fake", provider=openai),
    OpenAIResponsesModel("fake", provider=openai),
    AnthropicModel("fake", provider=AnthropicProvider(base_url=URL, api_key="any")),
):
    assert Agent(model).run_sync(SAY).output == SAID, model
    assert list(Agent(model).run_stream_sync(SAY).stream_text())[-1] == SAID, model
    assert Agent(model, tools=[weather]).run_sync(CALL).output == CALLED, model
    by_tool = 'CALL {"name": "final_result", "arguments": {"city": "Rome"}} END'
    assert Agent(model, output_type=City).run_sync(by_tool).output.city == CITY, model
    if not isinstance(model, AnthropicModel):
        assert Agent(model, output_type=NativeOutput(City)).run_sync(OBJECT).output.city == CITY, model
