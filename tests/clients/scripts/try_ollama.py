import ollama
from shared import CALL, CALLED, CITY, OBJECT, PLAIN_URL, SAID, SAY, URL, user, weather

client, plain = ollama.Client(host=URL), ollama.Client(host=PLAIN_URL)
assert client.chat("fake", user(SAY)).message.content == SAID
assert "".join(piece.message.content for piece in client.chat("fake", user(SAY), stream=True)) == SAID
assert client.generate("fake", SAY).response == SAID
history = user(CALL)
message = client.chat("fake", history, tools=[weather], think=True).message
assert message.thinking == "An order."
(call,) = message.tool_calls
history += [message, {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}]
assert client.chat("fake", history, tools=[weather]).message.content == CALLED
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
assert CITY in client.chat("fake", user(OBJECT), format=schema).message.content
assert len(plain.embed("my-model", ["a", "b"]).embeddings) == 2
assert [model.model for model in client.list().models] == ["fake:latest"]
for name, text in (("nobody", "x"), ("my-model", "word " * 9000)):
    try:
        plain.chat(name, user(text))
    except ollama.ResponseError as error:
        assert error.status_code == (404 if name == "nobody" else 400), error
    else:
        raise AssertionError(name)
