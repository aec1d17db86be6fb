export LLM_USER_PATH=$PWD/llm && mkdir -p "$LLM_USER_PATH"
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<END_OF_FILE
- model_id: infer
  model_name: fake
  api_base: "$INFER_URL/v1"
  supports_tools: true
  supports_schema: true
END_OF_FILE
llm -m infer --no-stream 'SAY hello END' | grep -x hello
llm -m infer 'SAY hello END' | grep -x hello
llm -m infer --schema '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}' 'SAY {"city": "Rome"} END' | grep Rome
llm -m infer --functions 'def weather(city: str) -> str: return f"rain in {city}"' \
  'CALL {"name": "weather", "arguments": {"city": "Rome"}} END' | grep 'The tool said: rain in Rome'
