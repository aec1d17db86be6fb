from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from shared import CALL, CITY, OBJECT, SAID, SAY, URL, weather


class City(BaseModel):
    """A city."""

    city: str


server = {"model": "fake", "api_base": f"{URL}/v1", "api_key": "any", "is_chat_model": True}
llm = OpenAILike(**server, is_function_calling_model=True, context_window=8192)
assert llm.complete(SAY).text == SAID
assert "".join(piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content=SAY)])) == SAID
tool = FunctionTool.from_defaults(weather)
assert llm.predict_and_call([tool], CALL).response == "rain in Rome"
strict = OpenAILike(**server, should_use_structured_outputs=True)
assert strict.as_structured_llm(City).complete(OBJECT).raw.city == CITY
