import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from shared import CALL, CALLED, CITY, OBJECT, SAID, SAY, URL, weather

set_tracing_disabled(True)


class City(BaseModel):
    city: str


async def main() -> None:
    server = AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="fake", openai_client=server)
        assert (await Runner.run(Agent(name="a", model=model), SAY)).final_output == SAID, kind
        agent = Agent(name="a", model=model, tools=[function_tool(weather)])
        assert (await Runner.run(agent, CALL)).final_output == CALLED, kind
        streamed = Runner.run_streamed(agent, CALL)
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output == CALLED, kind
        answer = await Runner.run(Agent(name="a", model=model, output_type=City), OBJECT)
        assert answer.final_output.city == CITY, kind


asyncio.run(main())
