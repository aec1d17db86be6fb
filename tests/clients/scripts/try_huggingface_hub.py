from huggingface_hub import InferenceClient
from shared import CALL, CITY, OBJECT, PLAIN_URL, SAID, SAY, URL, user

client = InferenceClient(base_url=f"{URL}/v1", api_key="any")
assert client.chat.completions.create(model="fake", messages=user(SAY)).choices[0].message.content == SAID
pieces = client.chat_completion(user(SAY), model="fake", stream=True)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == SAID
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": schema}}
message = (
    client.chat_completion(user(CALL), model="fake", tools=[tool], tool_choice="auto").choices[0].message
)
assert message.tool_calls[0].function.name == "weather"
wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
answer = client.chat_completion(user(OBJECT), model="fake", response_format=wanted)
assert CITY in answer.choices[0].message.content
plain = InferenceClient(base_url=f"{PLAIN_URL}/v1", api_key="any")
assert plain.chat_completion(user("Hi"), model="my-model", max_tokens=8, seed=1).usage.completion_tokens <= 8
