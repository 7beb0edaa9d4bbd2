"""A customer played by another model, which knows what it wants and is not trained."""

from openai import AsyncOpenAI

GOODBYE = "BYE"
PROMPT = (
    "You are a customer of a shop and talk to its support. {wish} Say one short sentence at a "
    f"time, and nothing that you were not asked for. When it is done, or cannot be, say {GOODBYE}."
)


class Customer:
    """One conversation: `opening`, then `answer` until it is None.

    Args:
        model: its name at the episode's endpoint: a table `[router.upstreams.NAME]`.
    """

    def __init__(self, wish: str, client: AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model
        # From where the customer sits, the agent is the user.
        self._messages: list = [
            {"role": "system", "content": PROMPT.format(wish=wish)},
            {"role": "user", "content": "Hello, how can I help?"},
        ]

    async def opening(self) -> str:
        """The first thing it says."""
        return await self._say()

    async def answer(self, text: str) -> str | None:
        """What it answers the agent; None when it leaves."""
        self._messages.append({"role": "user", "content": text})
        answer = await self._say()
        return None if GOODBYE in answer else answer

    async def _say(self) -> str:
        completion = await self._client.chat.completions.create(
            model=self._model, messages=self._messages
        )
        text = completion.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": text})
        return text
