from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from shared import CALL, CALLED, CITY, OBJECT, PLAIN_URL, SAID, SAY, URL, user, weather


class City(BaseModel):
    """A city."""

    city: str


openai = {"model": "fake", "base_url": f"{URL}/v1", "api_key": "any"}
for chat in (
    ChatOpenAI(**openai),
    ChatOpenAI(**openai, use_responses_api=True),
    ChatAnthropic(model="fake", base_url=URL, api_key="any", max_tokens=200),
    ChatOllama(model="fake", base_url=URL),
):
    assert chat.invoke(SAY).text == SAID, chat
    assert "".join(piece.text for piece in chat.stream(SAY)) == SAID, chat
    agent = create_agent(chat, tools=[tool(weather)])
    assert agent.invoke({"messages": user(CALL)})["messages"][-1].text == CALLED, chat
    methods = {} if isinstance(chat, ChatOllama) else {"method": "json_schema"}
    assert chat.with_structured_output(City, **methods).invoke(OBJECT).city == CITY, chat
server = {"model": "my-model", "base_url": f"{PLAIN_URL}/v1", "api_key": "any"}
assert OpenAIEmbeddings(**server, check_embedding_ctx_length=False).embed_query("sky")
assert OllamaEmbeddings(model="my-model", base_url=PLAIN_URL).embed_query("sky")
