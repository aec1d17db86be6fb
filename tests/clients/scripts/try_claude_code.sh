export ANTHROPIC_BASE_URL=$INFER_URL ANTHROPIC_AUTH_TOKEN=any ANTHROPIC_MODEL=fake CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude -p 'SAY hello END' | grep -x hello
claude -p 'CALL {"name": "Bash", "arguments": {"command": "echo made | tee made.txt"}} END' --allowedTools Bash |
  grep 'The tool said: made'
grep made made.txt
claude -p -c 'SAY again END' | grep -x again
schema='{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}'
claude -p 'CALL {"name": "StructuredOutput", "arguments": {"city": "Rome"}} END' --json-schema "$schema" | grep Rome
! claude -p --model nobody 'SAY hello END' > errors.txt
grep "nobody" errors.txt
! ANTHROPIC_BASE_URL=$INFER_PLAIN_URL ANTHROPIC_MODEL=my-model claude -p 'Hi' > errors.txt
grep "Prompt is too long" errors.txt
