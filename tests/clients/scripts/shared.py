"""What every script asks, and what it must hear: tests/clients/puppet.py has the rules."""

import os

URL = os.environ["INFER_URL"]  # the puppet, whose model is called "fake"
PLAIN_URL = os.environ["INFER_PLAIN_URL"]  # the default model, called "my-model"
SAY, SAID = "SAY hello END", "hello"
CALL, CALLED = 'CALL {"name": "weather", "arguments": {"city": "Rome"}} END', "The tool said: rain in Rome"
OBJECT, CITY = 'SAY {"city": "Rome"} END', "Rome"


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"
