cline auth -p openai-compatible -k any -m fake -b "$INFER_URL/v1"
cline 'SAY hello END' | grep hello
cline 'CALL {"name": "run_commands", "arguments": {"commands": ["echo made | tee made.txt"]}} END' | grep 'The tool said'
grep made made.txt
