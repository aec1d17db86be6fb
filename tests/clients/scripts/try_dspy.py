import dspy
from shared import PLAIN_URL, URL

dspy.configure(lm=dspy.LM("openai/fake", api_base=f"{URL}/v1", api_key="any", cache=False))
fields = "[[ ## answer ## ]]\nhello\n\n[[ ## completed ## ]]"
assert dspy.Predict("question -> answer")(question=f"SAY {fields} END").answer == "hello"
as_json = dspy.Predict("question -> answer")
with dspy.context(adapter=dspy.JSONAdapter()):
    assert as_json(question='SAY {"answer": "hello"} END').answer == "hello"
embedder = dspy.Embedder("openai/my-model", api_base=f"{PLAIN_URL}/v1", api_key="any", caching=False)
assert len(embedder(["a", "b"])) == 2
