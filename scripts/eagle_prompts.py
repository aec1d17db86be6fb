"""Prompts for training a draft head where nobody brings any: templates times topics, and a few apart.

`training` and `held_out` have no topic in common, so what is measured on the second was never answered in the
first. `WRITTEN` prompts follow no template at all: they show what is left outside of what was trained on.
"""

from __future__ import annotations

import random

TOPICS = """
photosynthesis; black holes; the water cycle; volcanoes; earthquakes; the immune system; vaccines
antibiotics; the human heart; sleep; dreams; memory; stress; exercise; nutrition; vitamins; coffee; tea
chocolate; bread; pasta; vegetable soup; gardening; composting; bees; ants; whales; elephants; cats; dogs
horses; birds; owls; trees; rainforests; deserts; oceans; rivers; mountains; glaciers; climate change
renewable energy; solar panels; wind turbines; nuclear power; electric cars; bicycles; trains; airplanes
ships; bridges; skyscrapers; houses; the Roman Empire; ancient Egypt; ancient Greece; the Renaissance
the Industrial Revolution; World War II; the Cold War; the French Revolution; the Silk Road
the printing press; the internet; computers; smartphones; programming; Python; databases; operating systems
computer networks; encryption; passwords; machine learning; robots; video games; chess; football; basketball
tennis; swimming; running; yoga; meditation; music; jazz; classical music; guitars; pianos; painting
sculpture; photography; movies; theatre; poetry; novels; fairy tales; libraries; schools; universities
teachers; homework; exams; languages; grammar; translation; writing; handwriting; public speaking
job interviews; resumes; teamwork; leadership; time management; budgeting; saving money; taxes; banks
inflation; supply and demand; entrepreneurship; marketing; advertising; customer service; recycling
friendship; family; parenting; birthdays; weddings; holidays; travel; Paris; Tokyo; New York; Australia
Brazil; India; Africa; the Moon; Mars; the Sun; stars; galaxies; gravity; light; sound; magnetism
electricity; atoms; molecules; chemistry; algebra; geometry; fractions; probability; statistics; calculus
logic; philosophy; ethics; democracy; human rights; laws; courts; elections; newspapers; social media
privacy; clocks; maps; money; salt
"""

ABOUT_ONE = """
What is {a}?
Explain {a} in simple terms.
Explain {a} to a ten-year-old.
Give me three interesting facts about {a}.
Write a short paragraph about {a}.
Write a short story about {a}.
Write a poem about {a}.
Write a haiku about {a}.
List five important things to know about {a}.
What are the advantages and disadvantages of {a}?
Why is {a} important?
What is the history of {a}?
How can I learn more about {a}?
Write an introduction for an essay about {a}.
Write a dialogue between a teacher and a student about {a}.
Create a quiz with three questions about {a}, with answers.
Write an email to a friend about {a}.
Write a formal letter to a newspaper about {a}.
Summarize what most people know about {a} in two sentences.
What are common misconceptions about {a}?
Give a step-by-step plan for a week of studying {a}.
Describe {a} using an analogy.
What would the world be like without {a}?
Write a funny joke about {a} and explain it.
Imagine an interview with an expert on {a}. Write the first questions and answers.
What does the future hold for {a}?
Write a product description for a book about {a}.
Name ten words that are related to {a}.
Make a table of facts about {a} in Markdown.
Write a JSON object that describes {a} with the keys "name", "category" and "summary".
Write a Python function that prints a fact about {a}.
Write a Python class for a program about {a}, with comments.
Give me advice for someone who is new to {a}.
Which questions should I ask about {a}?
I have to give a talk about {a}. Write an outline.
Write a tweet about {a}.
Write a slogan for a campaign about {a}.
Tell me a surprising story about {a}.
""".strip().splitlines()

ABOUT_TWO = """
Compare {a} and {b}.
What do {a} and {b} have in common?
Write a short story in which {a} and {b} both appear.
Which is more useful, {a} or {b}? Give reasons.
Write a dialogue between someone who loves {a} and someone who loves {b}.
How could {a} influence {b}?
Write a short lesson that connects {a} with {b}.
Someone asks me about {a} and {b}. What should I answer?
""".strip().splitlines()

WITHOUT = """
What is {n} plus {m}? Explain each step.
A shop sells {n} apples a day at {m} cents each. How much does it earn in a week?
If a train travels {n} kilometers in {m} minutes, what is its speed in kilometers per hour?
Write a Python function that returns the sum of all numbers from {n} to {m}.
Count from {n} to {m} by steps of your choice.
Write a list of {n} countries.
Is {n} a prime number? Explain why or why not.
Convert {n} kilograms to pounds and {m} miles to kilometers.
""".strip().splitlines()

WRITTEN = """
What is the capital of France?
Tell me about yourself.
How do I boil an egg?
Write a function in Python that reverses a string.
My computer is slow. What can I do?
Translate "good morning, how are you?" into Spanish and French.
Can you recommend a good book for a long flight?
What should I cook tonight with rice, tomatoes and eggs?
Write a thank-you note to my neighbour who looked after my plants.
Explain the difference between a list and a tuple in Python.
I feel tired all the time. What could be the reasons?
Write a bedtime story about a dragon who is afraid of the dark.
How does a refrigerator work?
Fix this sentence: "He don't knows where is the station."
What happened in the year 1969?
Write a SQL query that returns the ten most recent orders of a customer.
Give me a workout plan for beginners without equipment.
Who wrote Romeo and Juliet, and what is it about?
Summarize: The meeting was moved to Friday because the room was not free and two people were ill.
Describe the colour blue to someone who cannot see.
What is the difference between weather and climate?
How many days are there in a leap year, and why?
Write a limerick about a cat who plays the piano.
Plan a day in Rome for a family with two children.
What are the three states of matter?
Write a polite refusal to an invitation.
Explain recursion with an example.
Why is the sky blue?
Make a shopping list for a birthday party of eight children.
What is the meaning of the word "serendipity"?
""".strip().splitlines()

HELD_OUT_SHARE = 0.1


def training(count: int, seed: int) -> list[str]:
    """Return different prompts about the topics for training; fewer, where templates give no more."""
    return _compose(_topics(held_out=False), count, seed)


def held_out(count: int, seed: int) -> list[str]:
    """Return different prompts about the topics that no prompt for training has."""
    return _compose(_topics(held_out=True), count, seed + 1)


def _topics(*, held_out: bool) -> list[str]:
    topics = [topic.strip() for line in TOPICS.strip().splitlines() for topic in line.split(";")]
    random.Random(0).shuffle(topics)  # whatever the seed: the same topics are always held out
    cut = int(len(topics) * HELD_OUT_SHARE)
    return topics[:cut] if held_out else topics[cut:]


def _compose(topics: list[str], count: int, seed: int) -> list[str]:
    """All templates about one topic, then pairs of topics and numbers until there are enough."""
    rng = random.Random(seed)
    made = dict.fromkeys(template.format(a=topic) for template in ABOUT_ONE for topic in topics)
    wanted = max(count, len(made) * 5 // 4)
    for _ in range(4 * wanted):
        if len(made) >= wanted:
            break
        a, b = rng.sample(topics, 2)
        template = rng.choice(ABOUT_TWO * 4 + WITHOUT)
        made[template.format(a=a, b=b, n=rng.randint(3, 60), m=rng.randint(61, 400))] = None
    prompts = list(made)
    rng.shuffle(prompts)
    return prompts[:count]
