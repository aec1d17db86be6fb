import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel
from shared import CALL, CITY, OBJECT, SAID, SAY, URL, weather


class City(BaseModel):
    city: str


async def main() -> None:
    info = ModelInfo(
        vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True
    )
    client = OpenAIChatCompletionClient(model="fake", base_url=f"{URL}/v1", api_key="any", model_info=info)
    assert (await AssistantAgent("a", client).run(task=SAY)).messages[-1].content == SAID
    streaming = AssistantAgent("a", client, model_client_stream=True)
    assert (await streaming.run(task=SAY)).messages[-1].content == SAID
    agent = AssistantAgent("a", client, tools=[weather])
    assert (await agent.run(task=CALL)).messages[-1].content == "rain in Rome"
    answer = await AssistantAgent("a", client, output_content_type=City).run(task=OBJECT)
    assert answer.messages[-1].content.city == CITY


asyncio.run(main())
