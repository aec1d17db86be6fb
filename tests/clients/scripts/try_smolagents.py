from shared import URL, weather
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(model_id="fake", api_base=f"{URL}/v1", api_key="any")
end = 'CALL {"name": "final_answer", "arguments": {"answer": "hello"}} END'
assert ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=2).run(end) == "hello"
streaming = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=2, stream_outputs=True)
assert streaming.run(end) == "hello"
code = "SAY Thought: easy\n<code>\nfinal_answer(weather(city='Rome'))\n</code> END"
assert CodeAgent(tools=[tool(weather)], model=model, max_steps=2).run(code) == "rain in Rome"
