cat > opencode.json <<END_OF_FILE
{"model": "infer/fake", "autoupdate": false, "share": "disabled", "provider": {"infer": {
  "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$INFER_URL/v1", "apiKey": "any"}, "models": {"fake": {}}}}}
END_OF_FILE
opencode run 'SAY hello END' | grep hello
order='CALL {"name": "bash", "arguments": {"command": "echo made | tee made.txt", "description": "x"}} END'
opencode run "$order" | grep 'The tool said'
grep made made.txt
opencode run -c 'SAY again END' | grep again
