cat > config.yaml <<END_OF_FILE
name: local
version: 0.0.1
schema: v1
models:
  - name: fake
    provider: openai
    model: fake
    apiBase: $INFER_URL/v1
    apiKey: any
    capabilities: [tool_use]
END_OF_FILE
export CONTINUE_TELEMETRY_ENABLED=0
cn -p --config config.yaml 'SAY hello END' | grep hello
cn -p --auto --config config.yaml 'CALL {"name": "Bash", "arguments": {"command": "echo made | tee made.txt"}} END' |
  grep 'The tool said: made'
grep made made.txt
