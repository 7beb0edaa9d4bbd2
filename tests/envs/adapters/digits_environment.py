"""A verifiers environment of its own, without network: say digits.

Its harness is a program that asks once; the reward is the share of digits in what was said. Task 1
scores what is not there, the program of task 2 fails.
"""

import sys
from collections.abc import Iterator

import verifiers.v1 as vf

PROGRAM = """
import sys
import openai
base_url, api_key, model, prompt = sys.argv[1:]
if "fail" in prompt:
    sys.exit(3)
client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
messages = [{"role": "user", "content": prompt}]
print(client.chat.completions.create(model=model, messages=messages).choices[0].message.content)
"""


class DigitsData(vf.TaskData):
    is_scored: bool = True


class DigitsTask(vf.Task[DigitsData]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        if not self.data.is_scored:
            raise RuntimeError("the score is not there")
        reply = trace.last_reply
        return sum(map(str.isdigit, reply)) / max(1, len(reply))


class DigitsTaskset(vf.Taskset[DigitsTask]):
    def load(self) -> Iterator[DigitsTask]:
        yield DigitsTask(DigitsData(prompt="Say a number."), self.config.task)
        yield DigitsTask(DigitsData(prompt="Say one.", is_scored=False), self.config.task)
        yield DigitsTask(DigitsData(prompt="Please fail."), self.config.task)
        for number in range(20):
            yield DigitsTask(DigitsData(prompt=f"Say {number}."), self.config.task)


class AskOnceConfig(vf.HarnessConfig):
    pass


class AskOnce(vf.Harness[AskOnceConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        argv = [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program(argv, {})


__all__ = ["AskOnce", "DigitsTaskset"]
