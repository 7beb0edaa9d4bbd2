"""Two customers who know what they want: a script, and another model. Neither is trained."""

from openai import AsyncOpenAI

GOODBYE = "BYE"
HELLO = "Hello, how can I help?"
_PROMPT = (
    "You are a customer of a shop and talk to its support. {wish} Say one short sentence at a "
    f"time, and nothing that you were not asked for. When it is done, or cannot be, say {GOODBYE}."
)


class ScriptedCustomer:
    """Answers what is asked for, by the words `number` and `address`, and leaves otherwise.

    Args:
        wish: `number` and `item` of an order, and the `address` that it is to be sent to;
            without one it is to be cancelled.
    """

    def __init__(self, wish: dict[str, str]) -> None:
        self._wish = wish

    def wishes(self) -> str:
        """The first thing it says."""
        if "address" in self._wish:
            return f"Send my {self._wish['item']} elsewhere."
        return f"Cancel my {self._wish['item']}."

    def replies(self, text: str) -> str | None:
        """What it answers the agent; None when it leaves."""
        known = [self._wish[name] for name in ("number", "address") if name in self._wish]
        told = [known[0]] if "number" in text else []
        if "address" in text:
            told += known[1:]
        return ", ".join(told) or None

    async def opening(self) -> str:
        return self.wishes()

    async def answer(self, text: str) -> str | None:
        return self.replies(text)


class ModelCustomer:
    """One conversation with another model: `opening`, then `answer` until it is None.

    Args:
        wish: as of `ScriptedCustomer`.
        model: its name at the episode's endpoint: a table `[router.upstreams.NAME]`, or an earlier
            version of the policy.
    """

    def __init__(self, wish: dict[str, str], client: AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model
        # From where the customer sits, the agent is the user.
        self._messages: list = [
            {"role": "system", "content": prompt(wish)},
            {"role": "user", "content": HELLO},
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


def prompt(wish: dict[str, str]) -> str:
    """What a model is told that plays the customer."""
    aim = f"sent to {wish['address']}" if "address" in wish else "cancelled"
    said = f"You want your order of a {wish['item']} {aim}. Its number is {wish['number']}."
    return _PROMPT.format(wish=said)
