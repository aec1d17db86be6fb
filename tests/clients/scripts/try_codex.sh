export CODEX_HOME=$PWD/codex && mkdir -p "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" <<END_OF_FILE
model = "fake"
model_provider = "infer"
[model_providers.infer]
name = "infer"
base_url = "$INFER_URL/v1"
wire_api = "responses"
END_OF_FILE
run="codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
$run 'SAY hello END' | grep -x hello
$run 'CALL {"name": "exec_command", "arguments": {"cmd": "echo made | tee made.txt"}} END' | grep 'The tool said'
grep made made.txt
$run resume --last 'SAY again END' | grep -x again
echo '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"],"additionalProperties":false}' > s.json
$run --output-schema s.json 'SAY {"city": "Rome"} END' | grep Rome
! $run -m nobody 'SAY hello END' 2> errors.txt
grep "is not served here" errors.txt
