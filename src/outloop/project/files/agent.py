"""Your agent as a program: `python agent.py --task FILE` prints its answer."""

import argparse
import json

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--task", required=True)
with open(parser.parse_args().task) as file:
    task = json.load(file)
# The client reads OPENAI_BASE_URL and OPENAI_API_KEY from the environment.
answer = OpenAI().chat.completions.create(
    model="policy",
    messages=[{"role": "user", "content": task["question"]}],
)
print(answer.choices[0].message.content or "")
