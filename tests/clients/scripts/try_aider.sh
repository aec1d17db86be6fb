export OPENAI_API_BASE=$INFER_URL/v1 OPENAI_API_KEY=any AIDER_ANALYTICS=false
git init -q . && echo one > a.txt
aider --model openai/fake --no-check-update --no-show-model-warnings --no-gitignore --yes-always --no-git \
  --edit-format whole --message 'SAY a.txt
```
two
```
 END' a.txt
grep -x two a.txt
